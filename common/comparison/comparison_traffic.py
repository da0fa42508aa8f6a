"""The requests of a comparison's workload: parts drawn by seed, switched on and off, mixed by their arrival times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np

from cohort.common.comparison.comparison_spec import Part, TrafficSpec, parse_lengths, part_trace
from cohort.common.types import Slo
from cohort.common.workloads.agents import sessions
from cohort.common.workloads.arrivals import AllAtOnce, RandomArrivals
from cohort.common.workloads.changes import clip, together
from cohort.common.workloads.generate import FromTrace, Source, generate
from cohort.common.workloads.items import ClosedLoopPart, WorkItem, Workload
from cohort.common.workloads.papers import SHAPES
from cohort.common.workloads.slos import ecoserve
from cohort.common.workloads.traces import Trace, read_trace

_APART = 1009
"""Distance between the seeds of two parts of a workload."""
_CYCLES = 40
"""Requests of each user of a closed loop before its list begins anew."""
_SLO_STREAM, _FIRST_STREAM = 8, 9
"""Random streams that choose among several SLOs, and the first row of a trace; `generate.Stream` has the others."""


def traffic(spec: TrafficSpec, *, load: float, duration_s: float, seed: int) -> Workload:
    """Draw the requests of `duration_s`. The first part is what `cohort simulate --rate` sends with this seed."""
    parts = traffic_by_part(spec, load=load, duration_s=duration_s, seed=seed)
    return parts[0] if len(parts) == 1 else together(" + ".join(part.name for part in parts), parts)


def traffic_by_part(spec: TrafficSpec, *, load: float, duration_s: float, seed: int) -> list[Workload]:
    return [_part(part, load, duration_s, seed + _APART * index) for index, part in enumerate(spec.parts)]


def _part(part: Part, load: float, duration_s: float, seed: int) -> Workload:
    end_s = min(part.end_s or duration_s, duration_s)
    on_s = _time_on(part, max(0.0, end_s - part.start_s))
    rate = part.rate * (load if part.scaled else 1.0)
    name, lengths = _lengths(part, seed)
    count = part.requests or _CYCLES * part.users or None
    arrivals = AllAtOnce() if part.users or part.at_once else RandomArrivals(rate, part.cv)
    workload = generate(
        name,
        lengths,
        arrivals,
        count=count,
        duration_s=None if count else on_s,
        seed=seed,
        traffic_class=part.traffic_class,
    )
    if part.scale:
        workload = replace(workload, items=tuple(_scaled(item, part.scale) for item in workload.items))
    if part.agents:
        workload = sessions(workload, part.agents, until_s=on_s, seed=seed)
    workload = clip(workload, max_prompt=part.max_prompt, max_output=part.max_output, max_total=part.max_total)
    ttfts, tpots = _slos(part, len(workload.items), seed)
    items = tuple(
        replace(item, arrival_s=_arrival_s(part, item.arrival_s), slo=_slo(part, item, ttft_s, tpot_s))
        for item, ttft_s, tpot_s in zip(workload.items, ttfts, tpots, strict=True)
    )
    if not part.users:
        return replace(workload, items=items)
    until_s = math.inf if part.requests else end_s
    users = ClosedLoopPart(part.users, items, part.start_s, until_s, in_batches=part.together is not False)
    return replace(workload, items=(), closed_loop=(users,))


def _lengths(part: Part, seed: int) -> tuple[str, Source]:
    if part.paper:
        return part.paper, SHAPES[part.paper].lengths
    if part.lengths:
        return part.lengths, parse_lengths(part.lengths, "lengths")
    path = part_trace(part.trace)
    trace = _trace(path)
    if not part.in_order:
        return path.name, FromTrace(trace, path.name, resample=True)
    first = int(np.random.default_rng([seed, _FIRST_STREAM]).integers(len(trace.rows)))
    return path.name, FromTrace(replace(trace, rows=trace.rows[first:] + trace.rows[:first]), path.name)


def _scaled(item: WorkItem, factor: float) -> WorkItem:
    """Scale a request's lengths. Its shared prefix goes: it would no longer fit its blocks."""
    prompt, output = (max(2, round(tokens * factor)) for tokens in (item.prompt_tokens, item.output_tokens))
    return replace(item, prompt_tokens=prompt, output_tokens=output, hash_ids=(), hash_block=0)


def _slo(part: Part, item: WorkItem, ttft_s: float, tpot_s: float) -> Slo:
    return ecoserve(*part.whole_s)(item) if part.whole_s else Slo(ttft_s, tpot_s, part.deadline_s)


def _time_on(part: Part, length_s: float) -> float:
    """Return how many of these seconds the part sends."""
    if not part.period_s:
        return length_s
    whole, rest = divmod(length_s, part.period_s)
    return whole * part.burst_s + min(rest, part.burst_s)


def _arrival_s(part: Part, on_s: float) -> float:
    """Return the time at which the part has been on for `on_s`."""
    if not part.period_s:
        return part.start_s + on_s
    bursts, within = divmod(on_s, part.burst_s)
    return part.start_s + bursts * part.period_s + within


def _slos(part: Part, count: int, seed: int) -> tuple[Sequence[float], Sequence[float]]:
    """Draw a TTFT and a TPOT objective for each request, by the same draw: the strict ones go together."""
    draws = np.random.default_rng([seed, _SLO_STREAM]).random(count)

    def values(of: float | list[float]) -> list[float]:
        choices = of if isinstance(of, list) else [of]
        return [choices[int(drawn * len(choices))] for drawn in draws]

    return values(part.ttft_s), values(part.tpot_s)


@cache
def _trace(path: Path) -> Trace:
    return read_trace(path, sort=True)
