"""An engine measurement as JSON, and as tables for a person that hold no more. Called by `command`.

"prepacked" is torch with weights reordered for oneDNN, "ours" the engine's own form, "memory" reading the weights once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohort.services.bench.engine.report import (
    KERNEL_PARTS,
    Allocations,
    AttentionPoint,
    Comparison,
    EngineReport,
    Form,
    MemoryUse,
    StepPart,
    StepShares,
)
from cohort.services.bench.output import plain_table
from cohort.services.bench.targets import Target

FORMS: dict[Form, str] = {"linear": "F.linear", "prepacked": "prepacked", "ours": "ours", "memory": "memory"}
PARTS: dict[StepPart, str] = {
    "products": "matrix products",
    "attention": "attention",
    "elementwise": "norm, rotation, KV write",
    "embedding": "embedding",
    "sampling": "sampling",
    "inputs": "inputs",
    "dispatch": "rest of execute",
    "plan": "scheduler",
    "build": "batch building",
    "completed": "bookkeeping",
    "glue": "loop",
}


class EngineBench(msgspec.Struct, frozen=True, kw_only=True):
    """The document behind `--json`."""

    schema_version: int = 2
    mode: str = "engine"
    quick: bool
    engine: EngineReport
    targets: list[Target]
    findings: list[str]


def encode(result: EngineBench) -> bytes:
    """JSON with what is derived: whether targets were met."""
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
    yield from (_allocations(each) for each in report.allocations)
    yield _memory(report.memory)


def _heads(report: EngineReport) -> str:
    machine, model = report.machine, report.model
    loads = " to ".join(f"{load:.1f}" for load in machine.load_1m)
    return (
        f"[bold]{escape(model.name)}[/bold] in {machine.dtype}, {machine.threads} threads of {machine.cores} cores "
        f"({escape(machine.processor)}: {', '.join(machine.features)}), {machine.kernels} kernels, "
        f"torch {machine.torch}; load average {loads}"
    )


def _lower_bounds(kind: str, comparisons: Sequence[Comparison]) -> Table:
    """The matrix products of a step and nothing else."""
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
    found = plain_table("decode attention", "µs/layer", "KV GB/s", "memory GB/s", "share", "reversed", "gather + SDPA")
    for point in points:
        found.add_row(
            f"{point.rows} rows x {point.context}",
            f"{point.paged.median_s / point.layers * 1e6:.0f}",
            f"{point.rate / 1e9:.1f}",
            f"{point.bandwidth / 1e9:.1f}",
            f"{100 * point.share:.0f} %",
            f"{100 * (point.reversed_ratio - 1):+.1f} %",
            f"{point.gathered_ratio:.1f}x",
        )
    return found


def _allocations(found: Allocations) -> str:
    head = f"torch allocations in a decode step of {found.rows} rows x {found.context}: [bold]{found.count}[/bold]"
    if not found.count:
        return head
    named = ", ".join(f"{each.count} by {escape(each.operator)} ({each.total_bytes} B)" for each in found.by_operator)
    return f"{head}; {named}"


def _memory(memory: MemoryUse) -> str:
    def mib(size: int) -> str:
        return f"{size / 2**20:.0f} MiB"

    return (
        f"memory: weights {mib(memory.weights)}, step buffers {mib(memory.buffers)}, KV cache up to "
        f"{mib(memory.kv_reserved)}, host pool {mib(memory.host_reserved)}; resident {mib(memory.rss_before)} before "
        f"the model, {mib(memory.rss_loaded)} with it, {mib(memory.rss_stepped)} after first steps"
    )


def targets(every: Sequence[Target]) -> Table:
    """Targets beside results."""
    found = plain_table("target", "wanted", "found", "")
    for target in every:
        sign = "≤" if target.at_most else "≥"
        verdict = "[green]met[/green]" if target.met else "[red]missed[/red]"
        found.add_row(target.name, f"{sign} {target.wanted:g}", f"{target.found:.3g}", verdict)
    return found
