"""`cohort bench --engine`: what the engine's CPU path costs on this machine, against what it cannot be faster than.

Starts the measuring process (torch lives there), measures the growth of decisions itself (pure policies, no torch), and
publishes tables, JSON and a picture.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import get_args

import msgspec
from rich.console import Console

from cohort.common.config import dump_config, load_config
from cohort.common.engine_report import EngineReport, Section
from cohort.common.errors import ConfigError
from cohort.services.bench import plots
from cohort.services.bench.child import Report, Steps, run_child
from cohort.services.bench.engine_plot import write_engine_plot
from cohort.services.bench.engine_render import print_engine
from cohort.services.bench.engine_result import EngineBench, encode, step_curves
from cohort.services.bench.growth import QUICK, Curve, Sizes
from cohort.services.bench.growth import tasks as growth_tasks
from cohort.services.bench.options import ENGINE_SECTIONS
from cohort.services.bench.targets import engine_targets

_CHILD = "cohort.services.prefill_worker.engine_bench"


def execute(args: argparse.Namespace, errors: Console, console: Console) -> int:
    """Everything from parsed options. Raises `CohortError`."""
    if args.plot is not None:
        plots.check_available()
    quiet = args.quiet or args.json == "-"
    with Steps(Console(quiet=True) if quiet else errors) as steps:
        result = measure(args, steps.report)
    if not quiet:
        print_engine(result, console)
    publish_json(args.json, msgspec.json.format(encode(result), indent=2) + b"\n")
    if args.plot is not None:
        write_engine_plot(args.plot, result)
    return 0


def measure(args: argparse.Namespace, report: Report) -> EngineBench:
    sections = args.only or list(ENGINE_SECTIONS)
    inside = [section for section in sections if section in get_args(Section)]
    engine = _engine(args, inside, report) if inside else None
    growth: list[Curve] = []
    if "growth" in sections:
        wanted = list(growth_tasks(QUICK if args.quick else Sizes()))
        for done, (what, task) in enumerate(wanted):
            report(done, len(wanted), what)
            growth += task()
    if engine is not None:
        growth += step_curves(engine)
    targets = list(engine_targets(engine)) if engine is not None else []
    notes = engine.notes if engine is not None else []
    findings = [*notes, *(each.sentence for each in growth if each.sentence)]
    if args.quick:
        findings.append("--quick shows that everything runs; its memory is small enough for caches and its rounds few")
    return EngineBench(quick=args.quick, engine=engine, growth=growth, targets=targets, findings=findings)


def _engine(args: argparse.Namespace, sections: list[str], report: Report) -> EngineReport:
    overrides: dict[str, dict[str, str]] = {"engine": {"device": "cpu"}, "logging": {"level": "warning"}}
    model = {name: value for name, value in (("path", args.model), ("dtype", args.dtype)) if value}
    if model:
        overrides["model"] = model
    config = load_config(overrides=overrides)
    if args.model and not Path(args.model).is_dir():
        raise ConfigError(f"--model {args.model}: with --engine, a folder in Hugging Face format")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as folder:
        merged, output = Path(folder) / "config.yaml", Path(folder) / "report.json"
        merged.write_text(dump_config(config), encoding="utf-8")
        arguments = [
            "--config",
            str(merged),
            "--threads",
            str(args.threads or config.default_threads(cores)),
            "--output",
            str(output),
            "--sections",
            *sections,
        ]
        run_child(_CHILD, [*arguments, "--quick"] if args.quick else arguments, report)
        return msgspec.json.decode(output.read_bytes(), type=EngineReport)


def publish_json(path: str | None, document: bytes) -> None:
    """To a file, or to stdout for "-"."""
    if path == "-":
        sys.stdout.buffer.write(document)
        sys.stdout.flush()
    elif path is not None:
        Path(path).write_bytes(document)
