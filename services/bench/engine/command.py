"""`cohort bench engine`: the cost of the engine's CPU path on this machine, against its lower bounds.

Starts the measuring process, where torch is, and publishes tables and JSON: targets, too, and whether they were met. A
target is named, so that a missed one can be looked for in docs/benchmarks.md. "prepacked" is torch with weights
reordered for oneDNN, "ours" the engine's own form, "memory" reading the weights once.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohort.common.config import dump_config, load_config
from cohort.common.devices.cores import usable_cores
from cohort.common.errors import ConfigError
from cohort.common.hub.model_source import find
from cohort.services.bench.child import Report, run_child, shown_on
from cohort.services.bench.engine.report import (
    KERNEL_PARTS,
    PARTS,
    AttentionPoint,
    Comparison,
    EngineReport,
    Form,
    Section,
    StepShares,
)
from cohort.services.bench.output import add_output_arguments, check_output, output_console, plain_table, publish_json

FORMS: dict[Form, str] = {"linear": "F.linear", "prepacked": "prepacked", "ours": "ours", "memory": "memory"}


DECODE_OVER_PREPACKED = {(16, 128): 1.5, (64, 128): 1.4}
"""(rows, context): a step is at most so many times the prepacked products alone."""
PREFILL_OVER_PREPACKED = {512: 1.25}
OUTSIDE_KERNELS = {16: 0.15}
"""rows: at most this share of a step."""
ATTENTION_BANDWIDTH = {(16, 512): 0.60}
LINK_OVER_PERFTEST = 0.70


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """`found` should be at most, or at least, `wanted`."""

    name: str
    wanted: float
    found: float
    at_most: bool

    @property
    def met(self) -> bool:
        return self.found <= self.wanted if self.at_most else self.found >= self.wanted


def engine_targets(report: EngineReport) -> Iterator[Target]:
    """Yield the targets whose figure was measured."""
    for comparison in report.comparisons:
        for point in comparison.steps:
            ratio = point.ratios.get("prepacked")
            if comparison.kind == "decode":
                name = f"decode, {point.rows} rows x {point.context}: step / prepacked products"
                wanted = DECODE_OVER_PREPACKED.get((point.rows, point.context))
            else:
                name = f"prefill, {point.tokens_per_row} tokens: step / prepacked products"
                wanted = PREFILL_OVER_PREPACKED.get(point.tokens_per_row)
            if wanted is not None and ratio is not None:
                yield Target(name=name, wanted=wanted, found=ratio, at_most=True)
    for shares in report.shares:
        if (share := OUTSIDE_KERNELS.get(shares.rows)) is not None:
            name = f"decode, {shares.rows} rows x {shares.context}: share of a step outside kernels"
            yield Target(name=name, wanted=share, found=shares.outside_kernels, at_most=True)
    for attention in report.attention:
        if (share := ATTENTION_BANDWIDTH.get((attention.rows, attention.context))) is not None:
            name = f"attention, {attention.rows} rows x {attention.context}: share of the read bandwidth"
            yield Target(name=name, wanted=share, found=attention.share, at_most=False)


class EngineBench(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int = 2
    mode: str = "engine"
    quick: bool
    engine: EngineReport
    targets: list[Target]
    findings: list[str]


def encode(result: EngineBench) -> bytes:
    """Encode as JSON, with whether targets were met."""
    document: dict[str, Any] = msgspec.to_builtins(result)
    document["targets"] = [{**msgspec.to_builtins(target), "met": target.met} for target in result.targets]
    return msgspec.json.encode(document)


def print_engine(result: EngineBench, console: Console) -> None:
    for part in _engine(result.engine):
        console.print(part, soft_wrap=isinstance(part, str), highlight=False)
    if result.targets:
        console.print(targets(result.targets))
    for finding in result.findings:
        console.print(f"[yellow]note:[/yellow] {escape(finding)}", soft_wrap=True, highlight=False)


def _engine(report: EngineReport) -> Iterator[str | Table]:
    yield _heads(report)
    for kind in ("decode", "prefill"):
        comparisons = [comparison for comparison in report.comparisons if comparison.kind == kind]
        if comparisons:
            yield _lower_bounds(kind, comparisons)
            yield _steps(kind, comparisons)
    if report.shares:
        yield _shares(report.shares)
    if report.attention:
        yield _attention(report.attention)


def _heads(report: EngineReport) -> str:
    machine, model = report.machine, report.model
    loads = " to ".join(f"{load:.1f}" for load in machine.load_1m)
    return (
        f"[bold]{escape(model.name)}[/bold] in {machine.dtype}, {machine.threads} threads of {machine.cores} cores "
        f"({escape(machine.processor)}: {', '.join(machine.features)}), {machine.kernels} kernels, "
        f"torch {machine.torch}; load average {loads}"
    )


def _lower_bounds(kind: str, comparisons: Sequence[Comparison]) -> Table:
    forms = [form for form in FORMS if any(form in comparison.lower_bounds for comparison in comparisons)]
    found = plain_table(f"{kind}: products alone, ms", *(FORMS[form] for form in forms), "read GB/s")
    for comparison in comparisons:
        cells = [
            f"{comparison.lower_bounds[form].median_s * 1e3:.2f}" if form in comparison.lower_bounds else "–"
            for form in forms
        ]
        tokens = f"{comparison.tokens} rows" if kind == "decode" else f"{comparison.tokens} tokens"
        found.add_row(tokens, *cells, f"{comparison.bandwidth / 1e9:.1f}")
    return found


def _steps(kind: str, comparisons: Sequence[Comparison]) -> Table:
    forms = [form for form in FORMS if any(form in comparison.lower_bounds for comparison in comparisons)]
    ratios_to = [f"/ {FORMS[form]}" for form in forms]
    found = plain_table(f"{kind} step", "ms", "min–max", "tokens/s", *ratios_to)
    for comparison in comparisons:
        for point in comparison.steps:
            step = point.step
            shape = f"{point.rows} rows x {point.context}" if kind == "decode" else f"{point.tokens_per_row} tokens"
            ratios = [f"{point.ratios[form]:.2f}" if form in point.ratios else "–" for form in forms]
            rate = comparison.tokens / step.median_s
            spread = f"{step.min_s * 1e3:.2f}–{step.max_s * 1e3:.2f}"
            found.add_row(shape, f"{step.median_s * 1e3:.2f}", spread, f"{rate:.0f}", *ratios)
    return found


def _shares(shares: Sequence[StepShares]) -> Table:
    columns = [f"{one.rows} rows x {one.context}" for one in shares]
    found = plain_table("where a decode step goes, ms (share)", *columns)
    for part, title in PARTS.items():
        cells = []
        for one in shares:
            seconds = one.parts_s.get(part, 0.0)
            cells.append(f"{seconds * 1e3:.3f} ({100 * seconds / sum(one.parts_s.values()):4.1f} %)")
        found.add_row(title if part in KERNEL_PARTS else f"[dim]{title}[/dim]", *cells)
    found.add_section()
    found.add_row("step, with clocks", *(f"{one.clocked_s * 1e3:.3f}" for one in shares))
    found.add_row("step, without", *(f"{one.step_s * 1e3:.3f}" for one in shares))
    found.add_row("outside kernels", *(f"[bold]{100 * one.outside_kernels:.1f} %[/bold]" for one in shares))
    found.add_row("outside execute", *(f"{100 * one.outside_execute:.1f} %" for one in shares))
    return found


def _attention(points: Sequence[AttentionPoint]) -> Table:
    found = plain_table("decode attention", "µs/layer", "KV GB/s", "memory GB/s", "share", "reversed")
    for point in points:
        found.add_row(
            f"{point.rows} rows x {point.context}",
            f"{point.paged.median_s / point.layers * 1e6:.0f}",
            f"{point.rate / 1e9:.1f}",
            f"{point.bandwidth / 1e9:.1f}",
            f"{100 * point.share:.0f} %",
            f"{100 * (point.reversed_ratio - 1):+.1f} %",
        )
    return found


def targets(every: Sequence[Target]) -> Table:
    found = plain_table("target", "wanted", "found", "")
    for target in every:
        sign = "≤" if target.at_most else "≥"
        verdict = "[green]met[/green]" if target.met else "[red]missed[/red]"
        found.add_row(target.name, f"{sign} {target.wanted:g}", f"{target.found:.3g}", verdict)
    return found


_CHILD = "cohort.services.bench.engine.inside.measuring"
_SECTIONS: tuple[Section, ...] = get_args(Section)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", metavar="MODEL", help="folder, or id in Hugging Face's cache (default: the default model)"
    )
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), help="default: auto")
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads (default: as a worker has)")
    parser.add_argument("--only", nargs="+", choices=_SECTIONS, default=_SECTIONS, help="some of these parts")
    parser.add_argument("--quick", action="store_true", help="small and few: shows that it runs")
    add_output_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command with parsed options. Raises `CohortError`."""
    if args.threads is not None and args.threads < 1:
        raise ConfigError("--threads must be above 0")
    check_output(args)
    quiet = args.quiet or args.json == "-"
    engine = _measured(args, shown_on(Console(stderr=True, quiet=quiet)))
    findings = list(engine.notes)
    if args.quick:
        findings.append("--quick shows that everything runs; its memory is small enough for caches and its rounds few")
    result = EngineBench(quick=args.quick, engine=engine, targets=list(engine_targets(engine)), findings=findings)
    if not quiet:
        print_engine(result, output_console())
    publish_json(args.json, msgspec.json.format(encode(result), indent=2) + b"\n")
    return 0


def _measured(args: argparse.Namespace, report: Report) -> EngineReport:
    overrides: dict[str, dict[str, str]] = {"engine": {"device": "cpu"}, "logging": {"level": "warning"}}
    folder = str(find(args.model).path) if args.model else ""
    if folder and not Path(folder).is_dir():
        raise ConfigError(f"--model {args.model}: neither a folder in Hugging Face format nor such a model's id")
    model = {name: value for name, value in (("path", folder), ("dtype", args.dtype)) if value}
    if model:
        overrides["model"] = model
    config = load_config(overrides=overrides)
    cores = usable_cores()
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
