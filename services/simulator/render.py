"""Reports as tables for a person. Computes nothing that the JSON does not hold."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohort.services.simulator.advise.advise import Advice, Trial
from cohort.services.simulator.advise.planned_day import DayReport
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.core.run import Capacity
from cohort.services.simulator.core.statistics import Distribution
from cohort.services.simulator.reproduce.reproduce import Reproduced, shown_spread


def table(first: str, *columns: str) -> Table:
    """Make a table without frames: words left, figures right."""
    made = Table(first, box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right")
    return made


def print_report(report: SimReport, console: Console) -> None:
    print_head(report, console)
    rates = Table(show_header=False, box=None, pad_edge=False)
    rates.add_column()
    rates.add_column(justify="right")
    whole = report.overall
    refused = sum(whole.refused.values())
    rates.add_row("Finished / refused / sent", f"{whole.finished} / {refused} / {whole.sent}")
    rates.add_row("Duration (virtual)", f"{report.duration_s:.1f} s")
    rates.add_row("Requests", f"{whole.requests_per_s:.3f} /s")
    rates.add_row("Prompt, output tokens", f"{whole.prompt_tokens_per_s:.0f}, {whole.output_tokens_per_s:.0f} /s")
    console.print(rates)
    for reason, count in whole.refused.items():
        console.print(f"refused: {count} x {escape(reason)}")

    slices = {"": whole}
    if len(report.by_class) > 1:
        slices = {"all ": whole} | {f"{name} ": part for name, part in report.by_class.items()}
    latencies = table("ms", "mean", "p50", "p90", "p99", "max")
    for name, part in slices.items():
        for what, stats in (
            ("TTFT", part.ttft_ms),
            ("TPOT", part.tpot_ms),
            ("TBT", part.tbt_ms),
            ("JCT", part.jct_ms),
            ("JCT / output token", part.normalised_ms),
        ):
            if stats is not None:
                values = (stats.mean, stats.p50, stats.p90, stats.p99, stats.max)
                latencies.add_row(f"{name}{what}", *(f"{value:.1f}" for value in values))
    console.print(latencies)
    if any(part.slo for part in slices.values()):
        columns = ("kept of sent", "of ended", "TTFT", "TPOT", "deadline", "tokens", "goodput /s", "tokens /s")
        attained = table("SLOs attained", *columns)
        for name, part in slices.items():
            if part.slo is not None:
                p = part.slo
                shares = (p.kept_of_sent, p.attainment, p.ttft, p.tpot, p.deadline, p.tbt)
                attained.add_row(
                    name.strip() or "all",
                    *(f"{share:.1%}" for share in shares),
                    f"{p.goodput_requests_per_s:.2f}",
                    f"{p.goodput_tokens_per_s:.0f}",
                )
        console.print(attained)
    console.print(_instances(report))
    measured = report.measured
    console.print(
        f"decisions took {measured.worker_mean_us:.0f} us (worker, mean of {measured.worker_decisions}) and "
        f"{measured.manager_mean_us:.0f} us (manager, mean of {measured.manager_events}) of this machine's time; "
        f"{report.moved_bytes / 1e9:.1f} GB of KV moved between instances",
        soft_wrap=True,
    )
    for note in report.notes:
        console.print(f"[yellow]note:[/yellow] {escape(note)}", soft_wrap=True)


def print_head(report: SimReport, console: Console) -> None:
    console.print(
        f"[bold]{escape(report.preset)}[/bold]: {escape(report.model)} on {escape(report.device)} "
        f"({report.stack}, {report.decode_attention}); {escape(report.source or report.workload)}; "
        f"{escape(report.arrivals)}; predictor {report.predictor}; seed {report.seed}",
        soft_wrap=True,
    )


def comparison(label: str, names: Sequence[str], reports: Sequence[SimReport]) -> Table:
    latencies = ("TTFT p50", "TTFT p99", "TPOT p50", "TBT p99", "JCT p50")
    lines = table(label, "requests /s", "tokens /s", *latencies, "kept", "KV", "busy", "preempted")
    for name, report in zip(names, reports, strict=True):
        whole = report.overall
        instances = report.instances
        lines.add_row(
            name,
            f"{whole.requests_per_s:.2f}",
            f"{whole.output_tokens_per_s:.0f}",
            _ms(whole.ttft_ms, "p50"),
            _ms(whole.ttft_ms, "p99"),
            _ms(whole.tpot_ms, "p50"),
            _ms(whole.tbt_ms, "p99"),
            _ms(whole.jct_ms, "p50"),
            f"{whole.slo.kept_of_sent:.1%}" if whole.slo else "–",
            f"{sum(i.kv_mean for i in instances) / len(instances):.0%}",
            f"{sum(i.busy for i in instances) / len(instances):.0%}",
            f"{sum(i.preemptions for i in instances)}",
        )
    return lines


def capacity_line(capacity: Capacity) -> str:
    tried = ", ".join(f"{rate:.3g}/s {met:.1%}" for rate, met in sorted(capacity.tried))
    if not capacity.rate_per_s:
        return f"capacity: no rate tried keeps {capacity.target:.0%} of the SLOs ({tried})"
    found = f"[bold]{capacity.rate_per_s:.3g}[/bold] requests/s"
    return f"capacity at {capacity.target:.0%} of SLOs attained: {found} ({tried})"


def _instances(report: SimReport) -> Table:
    lines = table(
        "instance", "steps", "rows", "busy", "compute", "KV mean", "KV peak", "preempted", "no room", "padding"
    )
    for instance in report.instances[:16]:
        lines.add_row(
            instance.instance,
            f"{instance.steps}",
            f"{instance.mean_rows:.1f}",
            f"{instance.busy:.0%}",
            f"{instance.compute:.1%}",
            f"{instance.kv_mean:.0%}",
            f"{instance.kv_peak:.0%}",
            f"{instance.preemptions}",
            f"{instance.allocation_failures}",
            f"{instance.padding_waste:.0%}",
        )
    if len(report.instances) > 16:
        lines.add_row(f"… {len(report.instances) - 16} more in the JSON")
    return lines


def _ms(stats: Distribution | None, name: str) -> str:
    return "–" if stats is None else f"{getattr(stats, name):.0f}"


def advice_table(advice: Advice, most: int) -> Table:
    columns = ("kept", "goodput tokens/s", "TTFT p50", "TTFT p99", "TPOT p50", "TBT p99", "busy", "capacity /s")
    lines = table("candidate", *columns)
    for trial in advice.trials[:most]:
        whole = trial.report.overall
        settings = "".join(f"; {setting}" for setting in trial.settings)
        lines.add_row(
            f"{trial.preset}: {_roles(trial)}{settings}{'' if trial.whole else ' (first look only)'}",
            f"{whole.slo.kept_of_sent:.1%}" if whole.slo else "–",
            f"{whole.slo.goodput_tokens_per_s:.0f}" if whole.slo else "–",
            _ms(whole.ttft_ms, "p50"),
            _ms(whole.ttft_ms, "p99"),
            _ms(whole.tpot_ms, "p50"),
            _ms(whole.tbt_ms, "p99"),
            f"{trial.cost:.0%}",
            f"{trial.capacity.rate_per_s:.3g}" if trial.capacity else "",
        )
    return lines


def advice_rest(advice: Advice, most: int) -> Iterator[str]:
    """Yield what the table leaves out, and what could not be tried: every reason once."""
    hidden = len(advice.trials) - most
    if hidden > 0:
        yield f"{hidden} more candidates were tried (--all shows them)"
    for reason, candidates in advice.impossible.items():
        named = ", ".join(dict.fromkeys(candidates))
        yield f"cannot run: {named if len(candidates) <= 3 else f'{len(candidates)} candidates'}: {reason}"


def recommendation(advice: Advice) -> str:
    best = advice.best
    whole = best.report.overall
    met = f"keeps {whole.slo.kept_of_sent:.1%} of the SLOs" if whole.slo else "had no SLO"
    capacity = ""
    if best.capacity is not None and best.capacity.rate_per_s:
        capacity = f" and up to {best.capacity.rate_per_s:.3g} requests/s at {best.capacity.target:.0%}"
    line = f"[bold]Recommended: {best.preset}[/bold] with {_roles(best)}: {met}{capacity} ({escape(advice.why)}).\n"
    if advice.simulated_only:
        return f"{line}  Simulated only: {escape(advice.simulated_only)}."
    return f"{line}  {escape(advice.command)}"


def _roles(trial: Trial) -> str:
    group = f" of {trial.tensor_parallel} devices each" if trial.tensor_parallel > 1 else ""
    return ", ".join(f"{count} {role}" for role, count in trial.roles.items()) + group


def reproduction(results: Sequence[Reproduced]) -> Table:
    lines = Table("figure", "workload", "system", "metric", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("paper", "ours", "spread", "ratio"):
        lines.add_column(column, justify="right")
    lines.add_column("verdict")
    lines.add_column("note")
    for r in results:
        lines.add_row(
            r.figure,
            r.workload,
            r.baseline,
            f"{r.metric}, {r.unit}",
            r.shown_paper,
            f"{r.ours:.4g}",
            shown_spread(r.spread),
            "–" if math.isnan(r.ratio) else f"{r.ratio:.2f}",
            r.verdict,
            r.note,
        )
    return lines


def print_planned(report: DayReport, console: Console) -> None:
    lines = table("workers", "requests", "in time", "devices", "score")
    for row in (report.planned, *report.fixed):
        share, score = (f"{'< ' * row.broken_off}{value:.4f}" for value in (row.in_time, row.score))
        lines.add_row(row.name, str(row.requests), share, f"{row.devices:.2f}", score)
    console.print(lines)
    changes = sum(report.counts.get(action, 0) for action in ("changed", "undone"))
    error = "unknown" if report.error is None else f"{report.error:.3f}"
    console.print(
        f"planned from {report.started_with}: {changes} changes, {report.counts.get('undone', 0)} of them undone; "
        f"error at the end {error}, simulations took {100 * report.cpu_share:.1f} % of a core",
        soft_wrap=True,
    )
    for decision in report.decisions:
        after = "" if decision.measured_after is None else f", then {decision.measured_after:.3f}"
        console.print(
            f"  {decision.at_s:6.0f} s  {decision.action}: {decision.before} -> {decision.after}; predicted "
            f"{decision.predicted_before:.3f} -> {decision.predicted:.3f}{after} {decision.verdict}".rstrip(),
            highlight=False,
            soft_wrap=True,
        )
