"""Reports as tables for a person. Computes nothing that the JSON does not hold."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence

from rich import box
from rich.bar import Bar
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cohort.services.simulator.advise import regret
from cohort.services.simulator.advise.advise import Advice, Trial
from cohort.services.simulator.advise.planned_day import DayReport
from cohort.services.simulator.advise.regret import Pair
from cohort.services.simulator.core.capacity import SERVED, Capacity, Point
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.core.statistics import Distribution
from cohort.services.simulator.reproduce.reproduce import Reproduced, shown_spread

ADVICE_WIDTH = 80
_ADVICE_ROWS = 8
_REASONS = 3
_BAR_WIDTH = 10
_STAGES = {"first look": "1: ", "second look": "2: ", "third look": "3: ", "judged": ""}


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
    def outcome(point: Point) -> str:
        served = f", served {point.served:.0%}" if point.served < SERVED else ""
        return "too much" if point.broken_off else f"{point.kept:.1%}{served}"

    points = sorted(capacity.tried, key=lambda point: point.rate_per_s)
    tried = ", ".join(f"{point.rate_per_s:.3g}/s {outcome(point)}" for point in points)
    if not capacity.rate_per_s:
        return f"capacity: no rate tried keeps {capacity.target:.0%} of the SLOs ({tried})"
    longest_s = max(point.window_s for point in capacity.tried)
    found = f"[bold]{capacity.rate_per_s:.3g}[/bold] requests/s"
    return f"capacity at {capacity.target:.0%} of SLOs kept, for {longest_s:.0f} s: {found} ({tried})"


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


def print_advice(advice: Advice, slo: str, console: Console, *, everything: bool = False) -> None:
    """Print within 40 lines of 80 columns, unless `everything`."""
    best = advice.best
    report = best.report
    judged = [trial for trial in advice.trials if trial.stage == "judged"]
    console.print(
        f"[bold]{escape(report.model)}[/bold] on {escape(report.cluster)}; {escape(report.source or report.workload)}; "
        f"{escape(report.arrivals)}; SLO {escape(slo)}; {len(advice.trials)} set-ups, {len(judged)} of them judged on "
        f"seeds {advice.held_out[0]} to {advice.held_out[-1]}, {advice.judged_s:.0f} s each"
    )
    console.print(_judged_table(judged))
    console.print(_plot(advice.trials if everything else advice.trials[:_ADVICE_ROWS]))
    for line in _rest(advice, everything=everything):
        console.print(line, markup=False, highlight=False)
    whole = f"Recommended: {best.preset}, {_roles(best)}: keeps {best.kept:.1%} of the SLOs"
    if best.capacity is not None and best.capacity.rate_per_s:
        whole += f", and {best.capacity.target:.0%} up to {best.capacity.rate_per_s:.3g} requests/s"
    console.print(f"[bold]{escape(whole)}[/bold] ({escape(advice.why)}).")
    started = f"Simulated only: {advice.simulated_only}." if advice.simulated_only else advice.command
    console.print(f"  {started}", markup=False, highlight=False, soft_wrap=True)


def _judged_table(judged: Sequence[Trial]) -> Table:
    lines = table("judged (times: p99)", "kept %", "TTFT s", "TPOT ms", "tok/s", "busy %", "holds/s")
    lines.columns[0].no_wrap = lines.columns[1].no_wrap = True
    for trial in judged:
        whole = trial.report.overall
        lines.add_row(
            _setup(trial),
            "–".join(dict.fromkeys(f"{100 * share:.3g}" for share in (min(trial.seeds), max(trial.seeds)))),
            f"{whole.ttft_ms.p99 / 1e3:.2f}" if whole.ttft_ms else "–",
            _ms(whole.tpot_ms, "p99"),
            f"{whole.output_tokens_per_s:.0f}",
            f"{100 * trial.cost:.0f}",
            f"{trial.capacity.rate_per_s:.3g}" if trial.capacity else "",
        )
    return lines


def _plot(trials: Sequence[Trial]) -> Table:
    """Draw the share of SLOs kept, beside why each lost."""
    lines = table("set-up", "SLOs", "kept")
    lines.columns[0].no_wrap = True
    lines.add_column("why not (after look)")
    for trial in trials:
        why = "[bold]recommended[/bold]" if not trial.why_not else escape(f"{_STAGES[trial.stage]}{trial.why_not}")
        share = f"{100 * trial.kept:.0f} %"
        lines.add_row(escape(_setup(trial)), Bar(1.0, 0.0, trial.kept, width=_BAR_WIDTH), share, why)
    return lines


def _rest(advice: Advice, *, everything: bool) -> Iterator[str]:
    """Yield what the tables leave out, and what could not be tried: every reason once."""
    hidden = len(advice.trials) - _ADVICE_ROWS
    if hidden > 0 and not everything:
        yield f"{hidden} more lost in a look (--all shows them)"
    reasons = list(advice.impossible.items())
    for reason, refused in reasons if everything else reasons[:_REASONS]:
        named = ", ".join(dict.fromkeys(refused))
        yield f"cannot run: {named if len(refused) <= 3 else f'{len(refused)} candidates'}: {reason}"
    if len(reasons) > _REASONS and not everything:
        yield f"{len(reasons) - _REASONS} more reasons (--all shows them)"
    if advice.without_capacity:
        yield f"capacity: {advice.without_capacity}"


def _setup(trial: Trial) -> str:
    roles = "+".join(f"{count}{role[0]}" for role, count in trial.roles.items())
    group = f"x{trial.tensor_parallel}" if trial.tensor_parallel > 1 else ""
    settings = "".join(f" {setting.split('.')[-1].replace('prefill_', '')}" for setting in trial.settings[:1])
    return f"{trial.preset.replace('baseline-', 'b-')} {roles}{group}{settings}"


def _roles(trial: Trial) -> str:
    group = f" of {trial.tensor_parallel} devices each" if trial.tensor_parallel > 1 else ""
    return ", ".join(f"{count} {role}" for role, count in trial.roles.items()) + group


def regret_table(pairs: Sequence[Pair]) -> Table:
    lines = table("traffic and cluster", "set-ups", "advised", "keeps", "best of all", "keeps", "share of the best")
    for pair in pairs:
        lines.add_row(
            pair.label,
            f"{pair.setups}",
            pair.advised,
            f"{pair.kept:.1%}",
            pair.best,
            f"{pair.most:.1%}",
            f"{pair.share:.3f}",
        )
    shares = sorted(pair.share for pair in pairs)
    enough = sum(share >= regret.ENOUGH for share in shares)
    lines.caption = (
        f"{enough} of {len(shares)} keep {regret.ENOUGH:g} of the best; lowest {shares[0]:.3f}, "
        f"median {statistics.median(shares):.3f}"
    )
    return lines


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
