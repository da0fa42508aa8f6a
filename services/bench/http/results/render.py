"""The result as tables for a person. Called by `__main__`; computes nothing that the JSON does not hold."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohort.services.bench.http.results.figures import BenchResult, ComparedFigure
from cohort.services.bench.http.results.report import RunReport, Slice, SloReport
from cohort.services.bench.output import plain_table
from cohort.services.bench.rounds import Spread

SERVERS_SIDE_BY_SIDE = 3


def print_result(result: BenchResult, console: Console) -> None:
    if result.comparison is not None:
        _heads(result, console)
        console.print(_comparison(result.comparison))
    else:
        for run in result.runs:
            _print_run(run, console)
    for warning in dict.fromkeys(f"{_where(result, run)}{text}" for run in result.runs for text in run.warnings):
        console.print(f"[yellow]note:[/yellow] {escape(warning)}", soft_wrap=True)


def _where(result: BenchResult, run: RunReport) -> str:
    return f"{run.name}: " if result.mode == "compare" else ""


def _heads(result: BenchResult, console: Console) -> None:
    """Print each server once: rounds repeat it many times."""
    for run in {run.name: run for run in result.runs}.values():
        console.print(f"[bold]{escape(run.name)}[/bold] {escape(run.model)} at {escape(run.url)} ({_dialect(run)})")
    if result.runs:
        facts = result.runs[0].workload
        console.print(f"{facts.requests} requests; {escape(facts.source)}; {facts.arrivals}", soft_wrap=True)


def _dialect(run: RunReport) -> str:
    dialect = run.dialect
    preferences = [dialect.endpoint, f"prompts as {dialect.prompt_format}"]
    if dialect.ignore_eos:
        preferences.append("ignore_eos")
    return ", ".join(preferences)


def _print_run(run: RunReport, console: Console) -> None:
    whole = run.overall
    facts = run.workload
    if run.interrupted:
        console.print("[yellow]Interrupted: the figures are of what had ended by then.[/yellow]")
    console.print(f"[bold]{escape(run.model)}[/bold] at {escape(run.url)} ({_dialect(run)})")
    console.print(
        f"{facts.requests} requests planned; {escape(facts.source)}; {facts.arrivals}; seed {facts.seed}",
        soft_wrap=True,
    )

    totals = Table(show_header=False, box=None, pad_edge=False)
    totals.add_column()
    totals.add_column(justify="right")
    totals.add_row("Completed / failed / cancelled", f"{whole.completed} / {whole.failed} / {whole.cancelled}")
    totals.add_row("Duration", f"{run.duration_s:.2f} s")
    totals.add_row("In flight at most", f"{run.max_in_flight}")
    totals.add_row("Requests", f"{whole.requests_per_s:.2f} /s")
    totals.add_row("Output tokens", f"{whole.output_tokens_per_s:.1f} /s  ({whole.output_tokens})")
    totals.add_row("All tokens", f"{whole.total_tokens_per_s:.1f} /s  ({whole.prompt_tokens + whole.output_tokens})")
    totals.add_row("Output tokens at once", f"{whole.tokens_at_once:.2f}")
    if run.lengths is not None and run.lengths.cached_prompt_tokens is not None:
        totals.add_row("Prompt tokens from prefix cache", f"{run.lengths.cached_prompt_tokens}")
    console.print(totals)
    console.print(_latencies(whole))
    if whole.slo is not None:
        console.print(_slo(whole.slo), soft_wrap=True)
    for title, slices in (("class", run.by_class), ("kind", run.by_kind)):
        if slices:
            console.print(_breakdown(title, slices))
    if run.errors:
        errors = Table("error", "count", "for example", box=box.SIMPLE_HEAD)
        for kind, count in run.errors.items():
            errors.add_row(kind, str(count), escape(run.error_examples.get(kind, "")))
        console.print(errors)
    if run.loop_lag_ms is not None:
        console.print(f"client loop lag: p50 {run.loop_lag_ms.p50:.2f} ms, p99 {run.loop_lag_ms.p99:.2f} ms")


def _latencies(whole: Slice) -> Table:
    table = plain_table("ms", "mean", "p50", "p90", "p95", "p99", "max")
    rows = (
        ("TTFT", whole.ttft_ms),
        ("TPOT", whole.tpot_ms),
        ("ITL", whole.itl_ms),
        ("e2e", whole.e2e_ms),
        ("client queue", whole.client_queue_ms),
    )
    for name, found in rows:
        if found is None:
            table.add_row(name, *["–"] * 6)
        else:
            values = (found.mean, found.p50, found.p90, found.p95, found.p99, found.max)
            table.add_row(name, *(f"{value:.2f}" for value in values))
    return table


def _slo(slo: SloReport) -> str:
    limits = "; ".join(
        f"{figure.upper() if figure != 'e2e' else figure} "
        + ", ".join(f"{name + ' ' if name else ''}≤ {limit:g} ms" for name, limit in by_class.items())
        + f" kept by {slo.within.get(figure, 0)}"
        for figure, by_class in slo.limits_ms.items()
    )
    return (
        f"SLO ({limits}): {slo.attained} of {slo.sent} requests sent = [bold]{100 * slo.kept_of_sent:.1f} %[/bold] "
        f"({100 * slo.attainment:.1f} % of the {slo.judged} that completed or failed); goodput "
        f"{slo.goodput_requests_per_s:.2f} requests/s, {slo.goodput_output_tokens_per_s:.1f} output tokens/s"
    )


def _breakdown(title: str, slices: dict[str, Slice]) -> Table:
    latencies = ("TTFT p50", "p99", "TPOT p50", "p99", "e2e p50", "p99")
    table = plain_table(title, "done", "failed", "out tok/s", "at once", *latencies, "SLO %")
    for name, one in slices.items():
        cells = []
        for found in (one.ttft_ms, one.tpot_ms, one.e2e_ms):
            cells += ["–", "–"] if found is None else [_short(found.p50), _short(found.p99)]
        slo_share = f"{100 * one.slo.kept_of_sent:.1f}" if one.slo else "–"
        counts = (str(one.completed), str(one.failed), _short(one.output_tokens_per_s), f"{one.tokens_at_once:.2f}")
        table.add_row(escape(name) or "–", *counts, *cells, slo_share)
    return table


def _short(value: float) -> str:
    """Format with three digits, enough where columns are many."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _comparison(compared: list[ComparedFigure]) -> Table | str:
    if not compared:
        return "No round was completed by every server; nothing to compare."
    names = list(compared[0].by_name)
    if len(names) > SERVERS_SIDE_BY_SIDE:
        return _comparison_downwards(compared, names)
    ratios = (f"{escape(name)} / {escape(names[0])}" for name in names[1:])
    table = plain_table("median (min–max)", *(escape(name) for name in names), *ratios)
    for figure in compared:
        cells = [_spread(figure.by_name[name]) for name in names]
        cells += [_ratio(figure, name) for name in names[1:]]
        table.add_row(f"{figure.title} {figure.unit}".strip(), *cells)
    return table


def _comparison_downwards(compared: list[ComparedFigure], names: list[str]) -> Table:
    """Return a row for each figure and server: side by side so many would be cut to nothing."""
    table = plain_table("figure", "server", "median (min–max)", f"over {escape(names[0])}")
    for figure in compared:
        for name in names:
            title = f"{figure.title} {figure.unit}".strip() if name == names[0] else ""
            ratio = "" if name == names[0] else _ratio(figure, name)
            table.add_row(title, escape(name), _spread(figure.by_name[name]), ratio)
    return table


def _spread(found: Spread) -> str:
    return f"{found.median:.4g} ({found.min:.4g}–{found.max:.4g})"


def _ratio(figure: ComparedFigure, name: str) -> str:
    ratio = figure.ratio_to_first.get(name)
    if ratio is None:
        return "–"
    # Coloured only when every round agrees on the direction.
    better = ratio.min > 1.0 if figure.higher_is_better else ratio.max < 1.0
    worse = ratio.max < 1.0 if figure.higher_is_better else ratio.min > 1.0
    colour = "green" if better else "red" if worse else "default"
    return f"[{colour}]{ratio.median:.3f} ({ratio.min:.3f}–{ratio.max:.3f})[/{colour}]"
