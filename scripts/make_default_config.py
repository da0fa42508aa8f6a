"""Writes configs/default.yaml from common/config.py: every option, its built-in default, unit and meaning.

`python scripts/make_default_config.py` writes it, `--check` fails when it is out of date (a test runs that). The
meaning is the comment beside the field; a field without one is an error, so that no option goes unexplained.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import textwrap
import tokenize
import typing
from pathlib import Path
from typing import Any

import msgspec
import yaml

from cohort.common import config as config_module
from cohort.common.config import Config

TARGET = config_module.CONFIGS_DIR / "default.yaml"
WIDTH = 118

HEAD = """\
# Every option of Cohort with its built-in default, unit and meaning.
#
# Write only what differs into a file of your own: `cohort serve --config my.yaml`, or `--set section.option=value`.
# Later wins: built-in defaults, preset (configs/presets/), files in their order, command line.
# Generated from common/config.py by scripts/make_default_config.py; a test keeps it equal.
"""

# Fields whose name says it all in the source.
PLAIN = {
    "model.dtype": "of weights and KV; auto = bfloat16 where the device computes it fast, else float32",
    "gateway.host": "address clients connect to; 0.0.0.0 = every interface",
    "gateway.port": "port clients connect to; 0 = any free one, chosen by the launcher",
    "gateway.max_body_bytes": "longest request body; beyond: 413",
    "gateway.default_class": "class of a request that names none: rt = real-time, be = best-effort",
    "gateway.rt_tpot_slo_s": "seconds between two tokens promised then",
    "predictor.save_every_s": "seconds between two saves of what was learned",
    "manager.max_waiting_requests": "requests held here at most; beyond: refused",
    "monitor.heartbeat_s": "seconds between two heartbeats of a process",
    "monitor.port": "port of both; 0 = any free one, chosen by the launcher",
    "kv.prefix_caching": "keep KV of finished prompts and reuse it where a new prompt begins alike",
    "engine.preemption": "what happens to a preempted request's KV: to host memory and back, or computed again",
    "engine.report_interval_s": "seconds between two reports to the manager",
    "engine.drain_s": "on SIGTERM: the longest to finish what runs",
    "policies.admission": "seat at the gateway: may a request come in",
    "policies.placement": "seat at the manager: which worker computes which part of a request",
    "policies.prefill_order": "seat at the manager: which waiting request is dispatched next, in which batch",
    "policies.iteration": "seat at the worker: which rows the next iteration computes",
    "policies.allocation": "seat at the worker: how KV blocks are handed out",
    "policies.waiting_kv": "seat at the manager: when parked KV is bound to a decoding worker",
    "endpoints.manager": "inbox of the bucketing manager",
    "endpoints.predictor": "inbox of the length predictor",
    "endpoints.monitor": "inbox of the global monitor",
    "endpoints.gateway": "inbox of the gateway",
    "endpoints.bind_host": "address that processes with a tcp endpoint listen on",
    "security.curve_secret_key_file": 'the cluster\'s key file; "" = no encryption',
    "logging.level": "least severe level that is written",
    "metrics.host": "address of every process's /metrics and /health",
    "workers": "groups of workers: role (prefill, decode, unified), count, CPU threads of each (0 = engine.threads)",
    "name": "of the arrangement; shown by /version, in logs and metrics",
}


def render() -> str:
    comments = _field_comments()
    lines = [HEAD]
    for name, value in msgspec.to_builtins(Config()).items():
        hint = typing.get_type_hints(Config)[name]
        if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
            lines.append("")
            lines += _comment(_own_docstring(hint), "")
            lines.append(f"{name}:")
            types = typing.get_type_hints(hint)
            for key, inner in value.items():
                meaning = comments.get((hint.__name__, key)) or PLAIN.get(f"{name}.{key}")
                lines += _option(key, inner, _with_choices(meaning, types[key], f"{name}.{key}"), "  ")
        else:
            lines += ["", *_option(name, value, comments.get(("Config", name)) or PLAIN.get(name), "", above=True)]
    return "\n".join(lines) + "\n"


def _option(key: str, value: Any, meaning: str | None, indent: str, *, above: bool = False) -> list[str]:
    if not meaning:
        raise SystemExit(f"option {key} has no explanation: write a comment beside it in common/config.py")
    style = None if isinstance(value, list) else False  # lists of mappings: one line per mapping
    text = yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=style, allow_unicode=True, width=1000)
    assignment = textwrap.indent(text.rstrip(), indent)
    one_line = f"{assignment}  # {meaning}"
    if "\n" not in assignment and len(one_line) <= WIDTH and not above:
        return [one_line]
    return [*_comment(meaning, indent), assignment]


def _comment(text: str, indent: str) -> list[str]:
    wrapped = [line for part in text.splitlines() for line in (textwrap.wrap(part, WIDTH - 2 - len(indent)) or [""])]
    return [f"{indent}# {line}".rstrip() for line in wrapped]


def _with_choices(meaning: str | None, hint: Any, name: str) -> str | None:
    """Append the allowed words where the comment does not list them already."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    if meaning is None or typing.get_origin(inner) is not typing.Literal:
        return meaning
    choices = [str(choice) for choice in typing.get_args(inner)]
    return meaning if all(choice in meaning for choice in choices) else f"{meaning} ({', '.join(choices)})"


def _own_docstring(struct: type) -> str:
    return inspect.cleandoc(struct.__dict__.get("__doc__") or "")


def _field_comments() -> dict[tuple[str, str], str]:
    """(class, field) → the comment behind the field in the source."""
    source = Path(config_module.__file__).read_text(encoding="utf-8")
    by_line = {
        token.start[0]: token.string.lstrip("# ").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    found = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for statement in node.body:
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                comment = by_line.get(statement.end_lineno or statement.lineno)
                if comment:
                    found[node.name, statement.target.id] = comment
    return found


def main() -> int:
    text = render()
    if sys.argv[1:] == ["--check"]:
        if not TARGET.exists() or TARGET.read_text(encoding="utf-8") != text:
            sys.stderr.write("configs/default.yaml is out of date; run: python scripts/make_default_config.py\n")
            return 1
        return 0
    TARGET.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
