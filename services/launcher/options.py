"""Command line of `cohort serve` → merged configuration. Light to import: `cohort --help` builds this parser too."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cohort.common.command_line import Parser

DESCRIPTION = "Serve a language model: start all processes of a pipeline on this machine and watch over them."
EPILOG = """\
examples:
  cohort serve                                       the small default model on http://127.0.0.1:8000
  cohort serve --model Qwen/Qwen3-0.6B --download    a model by its id, from Hugging Face's cache, else fetched
  cohort serve --model ~/models/Qwen3-0.6B           any local folder in Hugging Face format
  cohort serve --model ~/models/Qwen3-0.6B-Q8_0.gguf a GGUF file, its weights as they are
  cohort serve --preset unified --port 9000          another arrangement of processes, another port
  cohort serve --model FOLDER --lora sql=~/lora/sql  a LoRA adapter beside it, served as the model "sql"
  cohort serve --set engine.max_rows=64              one option of configs/default.yaml, as many as you like
  cohort serve --print-config                        every option as it would be here, GPUs and workers included
  cohort serve --on ray --gateways all               on the nodes of a Ray cluster (docs/guide/ray.md)
  cohort serve --detach                              return once it is ready …
  cohort serve --status                              … see how it is …
  cohort serve --stop                                … and end it

Ctrl-C drains and ends all processes; a second Ctrl-C ends them at once.
Logs: one file per process, named at start. Live figures: `cohort status`, or the monitor's page named at start.
"""

DEFAULT_PORT = 8000

_KEYS = {
    "model": "model.path",
    "revision": "model.revision",
    "served_name": "model.served_name",
    "quantization": "model.quantization",
    "speculation": "speculation.mode",
    "kv_cache_dtype": "kv.cache_dtype",
    "host": "gateway.host",
}
"""Options that stand for one of the configuration. `cohort doctor` has some of them."""


VLLM = {
    "": "--model MODEL",
    "--api-key": "--set gateway.api_keys=[KEY], or `cohort keys add`",
    "--api-server-count": "--set gateway.processes=N",
    "--block-size": "--set kv.block_size=N",
    "--chat-template": "chat_template.jinja in the model's folder",
    "--data-parallel-size": "--preset unified --set 'workers=[{role: unified, count: N}]'",
    "--dtype": "--set model.dtype=NAME",
    "--enable-auto-tool-choice": "nothing, it is on; --set model.tool_format=NAME",
    "--enable-chunked-prefill": "nothing, it is on; --set engine.prefill_chunk=N",
    "--enable-lora": "--lora NAME=FOLDER",
    "--enable-prefix-caching": "nothing, it is on; --set kv.prefix_caching=false turns it off",
    "--enforce-eager": "--set engine.cuda_graph_memory_bytes=0",
    "--generation-config": "--set model.sampling_defaults=model, or neutral",
    "--gpu-memory-utilization": "--set kv.memory_fraction=X",
    "--kv-transfer-config": "--preset disaggregated, and section `transfer`",
    "--load-format": "--set model.weights=files, or random",
    "--lora-modules": "--lora NAME=FOLDER",
    "--max-loras": "--set engine.max_loras=N",
    "--max-model-len": "--set model.max_model_len=N",
    "--max-num-batched-tokens": "--set engine.max_step_tokens=N",
    "--max-num-seqs": "--set engine.max_rows=N",
    "--no-enable-prefix-caching": "--set kv.prefix_caching=false",
    "--reasoning-parser": "nothing, the chat template says; --set model.tool_format=NAME",
    "--served-model-name": "--served-name NAME",
    "--speculative-config": "--speculation MODE, and section `speculation`",
    "--ssl-certfile": "--tls-cert FILE",
    "--ssl-keyfile": "--tls-key FILE",
    "--swap-space": "--set kv.host_memory_bytes=N",
    "--tensor-parallel-size": "--preset unified --set 'workers=[{role: unified, tensor_parallel: N}]'",
    "--tool-call-parser": "nothing, the chat template says; --set model.tool_format=NAME",
    "--trust-remote-code": "nothing: code of a model's folder is never run",
    "--uvicorn-log-level": "--set logging.level=NAME",
}
"""Options here for those of `vllm serve`; "": for its positional model. docs/guide/vllm.md has it too."""


def add_arguments(parser: Parser) -> None:
    parser.equivalents = VLLM
    what = parser.add_argument_group("what to serve")
    what.add_argument(
        "--model",
        metavar="MODEL",
        help="folder in Hugging Face format, GGUF file, or a model's id in Hugging Face's cache: ORG/NAME, or "
        "ORG/NAME:FILE.gguf (default: SmolLM2-135M-Instruct)",
    )
    what.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a model's id (default: main)")
    what.add_argument(
        "--download",
        action="store_true",
        help="fetch a model that is named by its id and not in the cache: safetensors or the GGUF file, never pickles "
        "(or COHORT_DOWNLOAD=1; default: ask at a terminal, elsewhere refuse)",
    )
    what.add_argument(
        "--served-name", metavar="NAME", help="name clients use for it (default: the id, or the folder's name)"
    )
    what.add_argument(
        "--quantization",
        metavar="NAME",
        help="none, fp8, compressed-tensors, awq, gptq: what its weights must be; int8, int4: round plain ones at "
        "load, on a processor (default: as the checkpoint is)",
    )
    what.add_argument(
        "--kv-cache-dtype",
        metavar="NAME",
        help="auto: keys and values in the model's dtype; fp8: in half of 16 bits (default: auto)",
    )
    what.add_argument(
        "--lora",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="LoRA adapter in PEFT format that requests select by this model name; may be repeated",
    )
    how = parser.add_argument_group("how")
    how.add_argument(
        "--speculation",
        choices=("auto", "off", "lookup", "model"),
        help="expected tokens are computed along and kept where they are right: from prompt and answer (lookup), or "
        "by speculation.draft_model too (model) "
        "(default: auto, which is lookup on a processor and off on a GPU)",
    )
    how.add_argument("--preset", default="", metavar="NAME", help="one of configs/presets/, e.g. unified")
    how.add_argument(
        "--config",
        action="append",
        type=Path,
        default=[],
        metavar="FILE",
        help="YAML file of options over the preset; may be repeated, later files win",
    )
    how.add_argument(
        "--set",
        action="append",
        default=[],
        dest="assignments",
        metavar="KEY=VALUE",
        help="one option over all files, e.g. kv.block_size=32; may be repeated",
    )
    how.add_argument(
        "--print-config",
        action="store_true",
        help="print the configuration that would be served, every option settled for this machine, and end",
    )
    where = parser.add_argument_group("where")
    where.add_argument(
        "--port",
        type=int,
        metavar="PORT",
        help="port clients use (default: 8000; 0 = any free one). Monitor and metrics ports move along",
    )
    where.add_argument("--host", metavar="ADDRESS", help="address clients use (default: 127.0.0.1, this machine only)")
    where.add_argument("--tls-cert", metavar="FILE", help="certificate in PEM format: clients come by https")
    where.add_argument("--tls-key", metavar="FILE", help="its key; both files are read again when they change")
    where.add_argument(
        "--on",
        metavar="ray[=ADDRESS]",
        help="start the processes on the Ray cluster that this machine is a node of, or on that of HOST:PORT; "
        "ray=local: on a Ray of this machine alone (needs the extra ray)",
    )
    where.add_argument(
        "--only",
        choices=("gateways", "workers"),
        help="start these alone, of a pipeline whose other processes run elsewhere (section endpoints); their logs go "
        "to standard output. docker-compose.yml has all workers of a machine in one container by it",
    )
    where.add_argument("--run-dir", type=Path, metavar="FOLDER", help="folder of sockets and logs (default: by --port)")
    where.add_argument(
        "--gateways", metavar="N|all", help="with --on ray: nodes with a gateway each, this one first (default: 1)"
    )
    background = parser.add_argument_group("in the background")
    background.add_argument("--detach", action="store_true", help="return once it is ready; it goes on by itself")
    background.add_argument(
        "--ready-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="with --detach: the longest to wait for it (default: %(default).0f)",
    )
    background.add_argument("--stop", action="store_true", help="drain and end the pipeline on --port")
    background.add_argument("--status", action="store_true", help="show the processes of the pipeline on --port")
    parser.add_argument("--notify-fd", type=int, default=-1, help=argparse.SUPPRESS)


def overrides_of(options: argparse.Namespace, file_keys: set[str]) -> dict[str, Any]:
    """Return the command line as a nested mapping for `load_config`.

    `file_keys`: dotted names that the files set. With --port, monitor and metrics ports move along unless a file or an
    option set them, so that two pipelines run side by side with one option.
    """
    from cohort.common.config import nested
    from cohort.services.launcher.plan import METRICS_OFFSET, MONITOR_OFFSET

    named = {option: getattr(options, option, None) for option in _KEYS}
    flat: dict[str, Any] = {_KEYS[option]: value for option, value in named.items() if value is not None}
    for half in ("tls_cert", "tls_key"):
        if (path := getattr(options, half, None)) is not None:
            flat[f"gateway.{half}"] = str(Path(path).expanduser().absolute()) if path else ""
    assigned = assigned_by(options.assignments)
    if options.port is not None:
        port = options.port
        flat["gateway.port"] = port
        settled = file_keys | assigned.keys()
        for key, offset in (("monitor.port", MONITOR_OFFSET), ("metrics.base_port", METRICS_OFFSET)):
            if key not in settled:
                flat[key] = port + offset if port else 0
    merged = nested({**flat, **assigned}, "--set")
    if lora := getattr(options, "lora", []):
        section = merged.setdefault("model", {})
        section["lora"] = {**(section.get("lora") or {}), **adapters_of(lora)}
    return merged


def adapters_of(named: Sequence[str]) -> dict[str, str]:
    """Return the folders of --lora by their names; a name may hold dots and slashes."""
    from cohort.common.errors import ConfigError

    found: dict[str, str] = {}
    for text in named:
        name, equals, folder = text.partition("=")
        if not equals or not name.strip() or not folder:
            raise ConfigError(f"--lora {text}: write NAME=FOLDER, e.g. sql=~/adapters/sql")
        if name in found:
            raise ConfigError(f"--lora {text}: there is another adapter {name!r}")
        found[name] = str(Path(folder).expanduser().absolute())
    return found


def ray_address(options: argparse.Namespace) -> str:
    """Return ADDRESS of --on ray=ADDRESS, "" where none is named. Raises `ConfigError` for anything but Ray."""
    from cohort.common.errors import ConfigError

    name, _, address = str(options.on).partition("=")
    if name != "ray":
        raise ConfigError(f"--on {options.on}: write --on ray, or --on ray=HOST:PORT")
    return address


def assigned_by(assignments: Sequence[str]) -> dict[str, Any]:
    """Return the values of --set by their dotted names."""
    import yaml

    from cohort.common.config import parse_yaml
    from cohort.common.errors import ConfigError

    assigned: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not equals or not key.strip("."):
            raise ConfigError(f"--set {assignment}: write KEY=VALUE, e.g. kv.block_size=32")
        try:
            assigned[key.strip()] = parse_yaml(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {assignment}: the value is not valid YAML: {error}") from error
    return assigned


def keys_of(files: Sequence[Path]) -> set[str]:
    """Return the dotted names that YAML files set. Unreadable files set nothing; `load_config` reports them."""
    import yaml

    from cohort.common.config import parse_yaml

    names: set[str] = set()
    for file in files:
        try:
            names |= set(_dotted(parse_yaml(file.read_text(encoding="utf-8"))))
        except (OSError, UnicodeError, yaml.YAMLError):
            continue
    return names


def _dotted(data: Any, prefix: str = "") -> list[str]:
    if not isinstance(data, Mapping):
        return [prefix]
    return [name for key, value in data.items() for name in _dotted(value, f"{prefix}.{key}" if prefix else str(key))]
