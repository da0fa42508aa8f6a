"""A cell of `cohort compare --live`, measured: its pipeline from start to end, and one client for each of its parts.

A part is written as a trace and sent by `cohort bench`, so that live pipelines and simulations get the same requests at
the same moments. Called by `services/cli/__main__.py`. What only a simulation can do is a `ConfigError`.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cohort.common.comparison.comparison import Cell, CellResult, columns_of
from cohort.common.comparison.comparison_spec import Part
from cohort.common.comparison.comparison_traffic import traffic_by_part
from cohort.common.config import nested
from cohort.common.errors import ConfigError
from cohort.common.workloads.items import Workload
from cohort.common.workloads.traces import TraceRow, write_trace
from cohort.services.bench.live.pipelines import ClientCommand, Stats, pipeline

_ONE_TOKEN_A_STEP = {"speculation.mode": "off"}
"""Default of cells: responses to made-up prompts repeat themselves, and look-ups would find that."""
_WARM_UP = 4
_TOTALS = {
    "preemptions": "preemptions_total",
    "bucket splits": "bucket_splits_total",
    "splits": "splits_total",
    "whole": "whole_total",
    "shared blocks": "shared_blocks_total",
    "checkpointed slots": "checkpointed_slots_total",
    "offloaded": "pool_offloads_total",
    "prefetched": "pool_prefetches_total",
}
_HIGHEST = {
    "cost error": "cost_error",
    "error of predicted ends": "finish_error",
    "bias of predicted ends": "finish_bias",
    "lateness": "lateness_ratio",
    "error of step times": "profile_error",
}
_RATIOS = {
    "padding, %": (100, ("padding_tokens_total",), ("padding_tokens_total", "prefill_tokens_total")),
    "requests a batch": (1, ("batched_requests_total",), ("batches_total",)),
    "mixed iterations, %": (100, ("mixed_iterations_total",), ("decode_iterations_total",)),
    "iterations with formation, %": (100, ("formations_total",), ("iterations_total",)),
    "without any decision, %": (100, ("iterations_undecided_total",), ("iterations_total",)),
    "exposed a hand-over, ms": (1000, ("exposed_transfer_seconds_total",), ("kv_transfers_in_total",)),
}


def measure(cell: Cell, port: int) -> CellResult:
    """Raise `MeasurementFailed`, `ConfigError`."""
    arrivals = traffic_by_part(cell.traffic, load=cell.load, duration_s=cell.duration_s, seed=cell.seed)
    names = [part.name or f"{part.traffic_class} {number}" for number, part in enumerate(cell.traffic.parts)]
    options = nested({**_ONE_TOKEN_A_STEP, **cell.options}, cell.label)
    with tempfile.TemporaryDirectory() as folder:
        clients = [
            _client(name, part, workload, Path(folder) / f"{number}.csv", cell.seed)
            for number, (name, part, workload) in enumerate(zip(names, cell.traffic.parts, arrivals, strict=True))
        ]
        with pipeline(cell.compared.preset, options, port) as served:
            reports = served.load(clients)
            numbers = {**_columns_of_reports(reports), **columns_of_processes(served.stats(), served.metrics())}
    judged = [
        reports[name]
        for name, part in zip(names, cell.traffic.parts, strict=True)
        if cell.traffic.judged in ("all", part.traffic_class)
    ]
    slos = [report["slo"] for report in judged if report["slo"]]
    return CellResult(
        digest=cell.digest,
        workload=cell.workload,
        load=cell.load,
        seed=cell.seed,
        system=cell.system,
        sent=sum(report["sent"] for report in judged),
        finished=sum(report["completed"] for report in judged),
        kept=sum(slo["attained"] for slo in slos),
        kept_tokens_per_s=sum(slo["goodput_output_tokens_per_s"] for slo in slos),
        numbers=numbers,
    )


def _client(name: str, part: Part, workload: Workload, trace: Path, seed: int) -> ClientCommand:
    """Write the part's requests, and says who sends them."""
    loop = workload.closed_loop[0] if workload.closed_loop else None
    items = loop.items if loop else workload.items
    slos = {item.slo for item in items}
    if len(slos) != 1 or any(item.adapter for item in items) or (loop and loop.in_batches):
        raise ConfigError(
            f"{name}: a live part has requests, all of one SLO, no adapters, and users who are not together"
        )
    begin_s = loop.start_s if loop else items[0].arrival_s
    rows = (
        TraceRow(None if loop else item.arrival_s, item.prompt_tokens, item.output_tokens, item.hash_ids, item.session)
        for item in items
    )
    with trace.open("w", newline="", encoding="utf-8") as file:
        write_trace(rows, file, ("hash_ids", "session"))
    words = [f"--trace={trace}", f"--seed={seed}", f"--class-mix={part.traffic_class}=1"]
    words.append(f"--warmup={_WARM_UP if begin_s == 0 else 0}")
    words.append(f"--concurrency={loop.concurrency}" if loop else "--time-scale=1")
    if loop and loop.until_s < float("inf"):
        words.append(f"--duration-s={loop.until_s - loop.start_s}")
    if items[0].hash_ids:
        words.append(f"--hash-block={items[0].hash_block}")
    (slo,) = slos
    targets = {"ttft_slo_ms": slo.ttft_s, "tpot_slo_ms": slo.tpot_s, "deadline_ms": slo.deadline_s}
    given = {field: 1000 * limit_s for field, limit_s in targets.items() if limit_s}
    if given:
        words.append(f"--extra-body={json.dumps({'cohort': given})}")
    limits = {"ttft": slo.ttft_s, "tpot": slo.tpot_s, "e2e": slo.deadline_s, "itl": part.tbt_s}
    words += [f"--slo-{figure}-ms={1000 * limit_s:g}" for figure, limit_s in limits.items() if limit_s]
    return ClientCommand(name, tuple(words), begin_s)


def _columns_of_reports(reports: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Return the columns of all clients; of several each begins with the client's name."""
    found: dict[str, float] = {}
    for name, report in reports.items():
        columns = columns_of(report)
        if (slo := report["slo"]) and slo["itl_share"] is not None:
            columns["gaps within the bound, %"] = 100 * slo["itl_share"]
            columns["goodput, tokens/s"] = report["output_tokens_per_s"] * slo["itl_share"]
        found |= {f"{name}: {title}" if len(reports) > 1 else title: value for title, value in columns.items()}
    return found


def columns_of_processes(stats: Mapping[str, Stats], metrics: str) -> dict[str, float]:
    """Return columns of all processes' stats as of their last heartbeat, and of their Prometheus text."""

    def values(stat: str) -> list[float]:
        return [of[stat] for of in stats.values() if stat in of]

    found = {title: sum(values(stat)) for title, stat in _TOTALS.items() if values(stat)}
    found |= {title: max(values(stat)) for title, stat in _HIGHEST.items() if values(stat)}
    for title, (factor, parts, wholes) in _RATIOS.items():
        whole = sum(value for stat in wholes for value in values(stat))
        if whole and all(values(stat) for stat in parts):
            found[title] = factor * sum(value for stat in parts for value in values(stat)) / whole
    if count := _metric(metrics, "schedule_seconds_count"):
        found["decision, us"] = 1e6 * _metric(metrics, "schedule_seconds_sum") / count
    for title, histogram, bound, label in (
        ("iteration gaps within 5 ms, %", "iteration_gap_seconds", "0.005", 'instance="decode'),
        ("decode steps within 50 ms, %", "step_seconds", "0.05", 'kind="decode"'),
    ):
        if count := _metric(metrics, f"{histogram}_bucket", label, 'le="+Inf"'):
            found[title] = 100 * _metric(metrics, f"{histogram}_bucket", label, f'le="{bound}"') / count
    return found


def _metric(metrics: str, name: str, *labels: str) -> float:
    """Sum over all series with these labels; `name` without the prefix of ours and the process's."""
    lines = re.findall(rf"^cohort_\w*{re.escape(name)}(\{{[^}}]*\}})? (\S+)", metrics, re.MULTILINE)
    return sum(float(value) for found, value in lines if all(label in found for label in labels))
