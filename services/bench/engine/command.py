"""`cohort bench engine`: the cost of the engine's CPU path on this machine, against its lower bounds.

Starts the measuring process, where torch is, and publishes tables and JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console

from cohort.common.config import dump_config, load_config
from cohort.common.errors import ConfigError
from cohort.services.bench.child import Report, run_child, shown_on
from cohort.services.bench.engine.render import EngineBench, encode, engine_targets, print_engine
from cohort.services.bench.engine.report import EngineReport, Section
from cohort.services.bench.output import add_output_arguments, check_output, output_console, publish_json

_CHILD = "cohort.services.bench.engine.inside.measuring"
_SECTIONS: tuple[Section, ...] = get_args(Section)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="FOLDER", help="in Hugging Face format (default: the default model)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help="default: auto")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: as a worker has)")
    parser.add_argument("--only", nargs="+", choices=_SECTIONS, default=_SECTIONS, help="some of these parts")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Everything from parsed options. Raises `CohortError`."""
    if args.threads is not None and args.threads < 1:
        raise ConfigError("--threads must be above 0")
    check_output(args)
    quiet = args.quiet or args.json == "-"
    engine = _engine(args, shown_on(Console(stderr=True, quiet=quiet)))
    findings = list(engine.notes)
    if args.quick:
        findings.append("--quick shows that everything runs; its memory is small enough for caches and its rounds few")
    result = EngineBench(quick=args.quick, engine=engine, targets=list(engine_targets(engine)), findings=findings)
    if not quiet:
        print_engine(result, output_console())
    publish_json(args.json, msgspec.json.format(encode(result), indent=2) + b"\n")
    return 0


def _engine(args: argparse.Namespace, report: Report) -> EngineReport:
    overrides: dict[str, dict[str, str]] = {"engine": {"device": "cpu"}, "logging": {"level": "warning"}}
    model = {name: value for name, value in (("path", args.model), ("dtype", args.dtype)) if value}
    if model:
        overrides["model"] = model
    config = load_config(overrides=overrides)
    if args.model and not Path(args.model).is_dir():
        raise ConfigError(f"--model {args.model}: a folder in Hugging Face format")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        merged, output = Path(folder) / "config.yaml", Path(folder) / "report.json"
        merged.write_text(dump_config(config), encoding="utf-8")
        given = {
            "config": str(merged),
            "threads": args.threads or config.default_threads(cores),
            "output": str(output),
            "sections": args.only,
            "quick": args.quick,
        }
        run_child(_CHILD, [json.dumps(given)], report)
        return msgspec.json.decode(output.read_bytes(), type=EngineReport)
