"""Writes configs/default.yaml from common/config/: every option, its built-in default, unit and meaning.

`python scripts/make_default_config.py` writes it, `--check` fails when it is out of date (a test runs that). The
meaning is the comment beside or above the field; a field without one is an error, so that no option goes unexplained.
"""

from __future__ import annotations

import ast
import inspect
import io
import sys
import textwrap
import tokenize
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml

from cohort.common.config import CONFIGS_DIR, Config, gateway, policies, root, serving

TARGET = CONFIGS_DIR / "default.yaml"
WIDTH = 118
# What an operator sets: the file begins with them.
FIRST = (
    "model.path workers kv.memory_bytes gateway.host gateway.port gateway.tls_cert gateway.tls_key keys.file "
    "gateway.rt_ttft_slo_s state.folder"
)

HEAD = """\
# Every option of Cohort with its built-in default, unit and meaning.
#
# Write only what differs into a file of your own, as `section.option: value` or within sections: `cohort serve
# --config my.yaml`, or `--set section.option=value`.
# Later wins: built-in defaults, preset (configs/presets/), files in their order, command line. On a GPU, between the
# first two: max_rows, max_step_tokens, prefill_chunk, cuda_graph_memory_bytes, host_memory_bytes by what the machine
# has (common/config/device_defaults.py). `cohort serve --print-config` shows what comes of it.
# Generated from common/config/ by scripts/make_default_config.py; a test keeps it equal.

# The ten that an operator sets. What follows them may stay as it is.
"""


def render() -> str:
    comments = _field_comments()
    lines = [HEAD.rstrip()]
    types, values = typing.get_type_hints(Config), msgspec.to_builtins(Config())
    for dotted in FIRST.split():
        section, _, key = dotted.rpartition(".")
        meaning = comments.get((types[section].__name__ if section else "Config", key))
        lines += _option(dotted, (values[section] if section else values).pop(key), meaning, "")
    for name, value in values.items():
        if _is_section(types[name]):
            lines += ["", *_section(name, value, types[name], comments, "")]
        else:
            lines += ["", *_option(name, value, comments.get(("Config", name)), "", above=True)]
    return "\n".join(lines) + "\n"


def _section(name: str, values: Any, struct: Any, comments: Mapping[tuple[str, str], str], indent: str) -> list[str]:
    """Return a section with its docstring above it; sections inside it come last, as in the source."""
    lines = [*_comment(_own_docstring(struct), indent), f"{indent}{name}:"]
    types, within = typing.get_type_hints(struct), indent + "  "
    for key, value in values.items():
        if _is_section(types[key]):
            lines += _section(key, value, types[key], comments, within)
        else:
            meaning = _with_choices(comments.get((struct.__name__, key)), types[key])
            lines += _option(key, value, meaning, within)
    return lines


def _is_section(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, msgspec.Struct)


def _option(key: str, value: Any, meaning: str | None, indent: str, *, above: bool = False) -> list[str]:
    if not meaning:
        raise SystemExit(f"option {key} has no explanation: write a comment beside it in common/config/")
    style = None if isinstance(value, list | tuple) else False  # lists of mappings: one line per mapping
    text = yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=style, allow_unicode=True, width=1000)
    assignment = textwrap.indent(text.rstrip(), indent)
    one_line = f"{assignment}  # {meaning}"
    if "\n" not in assignment and len(one_line) <= WIDTH and not above:
        return [one_line]
    return [*_comment(meaning, indent), assignment]


def _comment(text: str, indent: str) -> list[str]:
    wrapped = [line for part in text.splitlines() for line in (textwrap.wrap(part, WIDTH - 2 - len(indent)) or [""])]
    return [f"{indent}# {line}".rstrip() for line in wrapped]


def _with_choices(meaning: str | None, hint: Any) -> str | None:
    """Append the allowed words where the comment does not list them already."""
    inner = typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else hint
    if meaning is None or typing.get_origin(inner) is not typing.Literal:
        return meaning
    choices = [str(choice) for choice in typing.get_args(inner)]
    return meaning if all(choice in meaning for choice in choices) else f"{meaning} ({', '.join(choices)})"


def _own_docstring(struct: type) -> str:
    return inspect.cleandoc(struct.__dict__.get("__doc__") or "")


def _field_comments() -> dict[tuple[str, str], str]:
    """Map (class, field) to the comment after the field in the source, or on the lines above where that is too long."""
    found = {}
    for module in (gateway, serving, policies, root):
        source = Path(module.__file__).read_text(encoding="utf-8")
        comments = {
            token.start[0]: token
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        }
        for node in ast.parse(source).body:
            for statement in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                    trailing = comments.get(statement.end_lineno or statement.lineno)
                    lines = [trailing] if trailing is not None else _lines_above(statement.lineno, comments)
                    if lines:
                        found[node.name, statement.target.id] = " ".join(
                            line.string.lstrip("# ").strip() for line in lines
                        )
    return found


def _lines_above(line: int, comments: Mapping[int, tokenize.TokenInfo]) -> list[tokenize.TokenInfo]:
    """Return comments that have a line to themselves, without a gap; one after a field belongs to that field."""
    found: list[tokenize.TokenInfo] = []
    while (above := comments.get(line - 1 - len(found))) is not None and above.line.strip() == above.string:
        found.insert(0, above)
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
