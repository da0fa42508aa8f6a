"""The result as one picture: latency distributions and throughput over time, or figures against the load of a sweep.

Called by `__main__` when asked; matplotlib is imported only then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cohort.services.bench.http.load.records import RequestRecord
from cohort.services.bench.http.results.export import BenchResult
from cohort.services.bench.http.results.figures import FIGURES
from cohort.services.bench.picture import COLOURS, picture

if TYPE_CHECKING:
    from cohort.services.bench.http.harness import Measurement

_TIME_BINS = 40
_MIN_BIN_S = 0.25


def write_plot(path: Path, result: BenchResult, measurements: Sequence[Measurement]) -> None:
    with picture(path, 2, 2, _title(result)) as axes:
        if result.mode in ("sweep", "capacity"):
            _against_load(axes, result)
        else:
            _distributions(axes, result, measurements)


def _title(result: BenchResult) -> str:
    if not result.runs:
        return "no run"
    run = result.runs[0]
    models = ", ".join(dict.fromkeys(r.model for r in result.runs))
    load = "" if result.mode in ("sweep", "capacity") else f"; {run.workload.arrivals}"
    counts = sorted({r.workload.requests for r in result.runs})
    requests = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{models}\n{requests} requests; {run.workload.source}{load}"


def _distributions(axes: Any, result: BenchResult, measurements: Sequence[Measurement]) -> None:
    """Rounds of the same server are put together in the distributions; over time the first round stands for all."""
    by_name: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        by_name.setdefault(measurement.report.name, []).append(measurement)
    panels: tuple[tuple[Any, str, Callable[[RequestRecord], float | None]], ...] = (
        (axes[0][0], "TTFT", lambda record: record.ttft_s),
        (axes[0][1], "TPOT", lambda record: record.tpot_s),
        (axes[1][0], "end to end", lambda record: record.e2e_s),
    )
    for colour, (name, parts) in zip(_cycle(len(by_name)), by_name.items(), strict=True):
        label = name if len(by_name) > 1 else None
        done = [record for part in parts for record in part.records if record.status == "completed"]
        for axis, _, read in panels:
            values = np.sort([value * 1e3 for record in done if (value := read(record)) is not None])
            if len(values):
                axis.step(values, np.arange(1, len(values) + 1) / len(values), where="post", color=colour, label=label)
        times, rates = token_rate(parts[0].records)
        if len(times):
            axes[1][1].plot(times, rates, marker=".", color=colour, label=label)
    for axis, title, _ in panels:
        axis.set(title=f"{title}, share of requests", xlabel="ms", ylim=(0, 1.02))
        axis.set_xlim(left=0)
    axes[1][1].set(title="output per second over time", xlabel="s since the start", ylabel="output chunks/s")
    axes[1][1].set_ylim(bottom=0)
    if len(by_name) > 1:
        for axis in axes.flat:
            axis.legend(frameon=False)
    elif measurements:
        _in_flight(axes[1][1], measurements[0].records)
    if result.runs and result.runs[0].overall.slo is not None:
        _limit_lines((axes[0][0], axes[0][1], axes[1][0]), result.runs[0].overall.slo.limits_ms)


def _limit_lines(axes: Sequence[Any], limits_ms: dict[str, dict[str, float]]) -> None:
    for axis, figure in zip(axes, ("ttft", "tpot", "e2e"), strict=True):
        for name, limit_ms in limits_ms.get(figure, {}).items():
            axis.axvline(limit_ms, color="#888", linestyle="--", linewidth=1)
            axis.annotate(
                f"SLO {name}".strip(), (limit_ms, 0.03), xytext=(3, 0), textcoords="offset points", color="#666"
            )


def _in_flight(axis: Any, records: Sequence[RequestRecord]) -> None:
    other = axis.twinx()
    steps = sorted([(record.sent_s, 1) for record in records] + [(record.end_s, -1) for record in records])
    if steps:
        running = np.cumsum([step for _, step in steps])
        other.step([at for at, _ in steps], running, where="post", color="#bbb", linewidth=0.9)
    other.set_ylabel("requests in flight (grey)")
    other.set_ylim(bottom=0)
    other.grid(False)
    # Behind the rate, which is what the panel is about.
    axis.set_zorder(other.get_zorder() + 1)
    axis.patch.set_visible(False)


def token_rate(records: Sequence[RequestRecord]) -> tuple[list[float], list[float]]:
    """Middle of each time bin and the chunks with output per second in it."""
    stamps = np.array([at for record in records for at in record.token_s])
    if not len(stamps):
        return [], []
    end_s = float(stamps.max())
    width_s = max(_MIN_BIN_S, end_s / _TIME_BINS)
    # The last bin is full, or a partly filled one would show a drop that did not happen.
    edges = np.arange(0.0, end_s + width_s, width_s)
    edges[-1] = end_s
    if len(edges) > 2 and edges[-1] - edges[-2] < width_s / 2:
        edges = np.delete(edges, -2)
    counts, _ = np.histogram(stamps, edges)
    widths = np.diff(edges)
    keep = widths > 0
    return ((edges[:-1] + edges[1:]) / 2)[keep].tolist(), (counts[keep] / widths[keep]).tolist()


def _against_load(axes: Any, result: BenchResult) -> None:
    if result.capacity is not None:
        key, values = "rate", [point.rate for point in result.capacity.points]
    else:
        key, values = result.sweep_key or "", result.sweep_values or []
    points = sorted(zip(values, result.runs, strict=False), key=lambda point: point[0])
    panels = (
        (axes[0][0], "TTFT", "ms", ("ttft_p50_ms", "ttft_p99_ms")),
        (axes[0][1], "TPOT", "ms", ("tpot_p50_ms", "tpot_p99_ms")),
        (axes[1][0], "output tokens", "tokens/s", ("output_tokens_per_s",)),
        (axes[1][1], "SLO kept, of all sent", "%", ("slo_kept_of_sent",)),
    )
    for axis, title, unit, keys in panels:
        for colour, figure in zip(COLOURS, [figure for figure in FIGURES if figure.key in keys], strict=False):
            found = [(at, value) for at, run in points if (value := figure.read(run)) is not None]
            if found:
                axis.plot([at for at, _ in found], [v for _, v in found], marker="o", color=colour, label=figure.title)
        axis.set(title=title, xlabel={"rate": "requests/s offered"}.get(key, key), ylabel=unit)
        axis.set_ylim(bottom=0)
        if len(keys) > 1 and axis.lines:
            axis.legend(frameon=False)
    if axes[1][1].lines:
        axes[1][1].set_ylim(0, 105)
        if result.capacity is not None:
            axes[1][1].axhline(100 * result.capacity.wanted_attainment, color="#888", linestyle="--", linewidth=1)
    else:
        axes[1][1].set_title("requests completed")
        found = [(at, run.overall.requests_per_s) for at, run in points]
        axes[1][1].plot([at for at, _ in found], [v for _, v in found], marker="o", color=COLOURS[0])
        axes[1][1].set(ylabel="requests/s")
        axes[1][1].set_ylim(bottom=0)


def _cycle(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]
