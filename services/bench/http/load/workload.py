"""The workload: which request is due when, how long it is, what it shares with others. Pure and seeded.

Called by `harness` once per run; the same spec gives the same plans, on any machine. Contents of prompts are drawn
later (`prompts`) from a second number, the salt, so that a repeated run keeps lengths and arrivals but meets no warm
prefix cache. Every clip and skip is counted in `WorkloadFacts` and stated in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from cohort.common.errors import ConfigError
from cohort.common.workloads.arrivals import (
    Arrivals,
    ClosedLoop,
    RandomArrivals,
    TraceTimes,
    describe,
    due_times,
    enough_for,
)
from cohort.common.workloads.generate import Drawn, FromTrace, Mixed, Stream, describe_source, draw_rows, stream
from cohort.common.workloads.lengths import LengthDistribution, draw
from cohort.services.bench.http.load.datasets import DatasetRow


@dataclass(frozen=True, slots=True)
class FromDataset:
    """Real prompts, cycled when there are fewer than requests; `output` bounds the answer where a row does not."""

    rows: tuple[DatasetRow, ...]
    name: str
    output: LengthDistribution


Source = Drawn | Mixed | FromTrace | FromDataset


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Everything that decides a workload. `num_requests` None: a trace's length, or what fits in `duration_s`."""

    source: Source
    arrivals: Arrivals
    num_requests: int | None
    duration_s: float | None = None
    max_prompt_tokens: int | None = None
    max_output_tokens: int | None = None
    class_mix: tuple[tuple[str, float], ...] = ()
    seed: int = 0


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request to send. `due_s` None: as soon as a slot is free. `row` is set for real text, whose length in
    tokens is unknown (0) until the server counts it. `group` labels the component of a mix."""

    index: int
    due_s: float | None
    prompt_tokens: int
    output_tokens: int
    group: str = ""
    traffic_class: str = ""
    hash_ids: tuple[int, ...] = ()
    session: str = ""
    row: DatasetRow | None = None


class WorkloadFacts(msgspec.Struct, frozen=True):
    """Facts that a reader of a result must know of its workload. Lengths are as planned, after clipping."""

    arrivals: str
    source: str
    requests: int
    seed: int
    prompt_tokens: int
    output_tokens: int
    offered_requests_per_s: float | None
    clipped_prompts: int
    clipped_outputs: int
    skipped_rows: int
    shares_prefixes: bool


@dataclass(frozen=True, slots=True)
class Workload:
    plans: tuple[RequestPlan, ...]
    arrivals: Arrivals
    facts: WorkloadFacts


def build(spec: WorkloadSpec) -> Workload:
    """Lengths, then arrivals, then classes; each from its own random stream."""
    count = _count(spec)
    plans, clipped_prompts, clipped_outputs = _clip(_lengths(spec, count), spec)
    trace = spec.source.trace if isinstance(spec.source, FromTrace) else None
    trace_s = trace.arrival_s[:count] if trace is not None and trace.arrival_s is not None else None
    if isinstance(spec.arrivals, TraceTimes) and trace is None:
        raise ConfigError("trace times need a --trace; give --rate, --concurrency or --all-at-once")
    due = due_times(spec.arrivals, count, stream(spec.seed, Stream.ARRIVALS), trace_s)
    if due is not None:
        plans = [replace(plan, due_s=due_s) for plan, due_s in zip(plans, due, strict=True)]
        if spec.duration_s is not None:
            plans = [plan for plan in plans if plan.due_s is not None and plan.due_s < spec.duration_s]
    plans = _classes(plans, spec)
    span_s = plans[-1].due_s if plans else None
    facts = WorkloadFacts(
        arrivals=describe(spec.arrivals),
        source=_describe_source(spec.source),
        requests=len(plans),
        seed=spec.seed,
        prompt_tokens=sum(plan.prompt_tokens for plan in plans),
        output_tokens=sum(plan.output_tokens for plan in plans),
        offered_requests_per_s=(len(plans) - 1) / span_s if span_s else None,
        clipped_prompts=clipped_prompts,
        clipped_outputs=clipped_outputs,
        skipped_rows=trace.skipped_rows if trace is not None else 0,
        shares_prefixes=any(plan.hash_ids or plan.session for plan in plans),
    )
    return Workload(tuple(plans), spec.arrivals, facts)


def _count(spec: WorkloadSpec) -> int:
    if isinstance(spec.source, FromTrace):
        rows = len(spec.source.trace.rows)
        return rows if spec.num_requests is None else min(rows, spec.num_requests)
    if spec.num_requests is not None:
        return spec.num_requests
    if spec.duration_s is not None and isinstance(spec.arrivals, RandomArrivals):
        return enough_for(spec.arrivals, spec.duration_s)  # the surplus is cut off by time
    if spec.duration_s is not None and isinstance(spec.arrivals, ClosedLoop):
        raise ConfigError("--duration-s with --concurrency needs --num-requests as the upper bound")
    return 100


def _lengths(spec: WorkloadSpec, count: int) -> list[RequestPlan]:
    source = spec.source
    match source:
        case Drawn() | Mixed() | FromTrace():
            return [
                RequestPlan(
                    i,
                    None,
                    row.prompt_tokens,
                    row.output_tokens,
                    hash_ids=row.hash_ids,
                    session=row.session,
                    group=f"{row.prompt_tokens}x{row.output_tokens}" if isinstance(source, Mixed) else "",
                )
                for i, row in enumerate(draw_rows(source, count, spec.seed))
            ]
        case FromDataset(texts, _, output):
            outputs = draw(output, stream(spec.seed, Stream.OUTPUT_LENGTHS), count)
            chosen = [texts[i % len(texts)] for i in range(count)]
            return [
                RequestPlan(i, None, 0, row.output_tokens or int(outputs[i]), group=row.category, row=row)
                for i, row in enumerate(chosen)
            ]


def _clip(plans: Sequence[RequestPlan], spec: WorkloadSpec) -> tuple[list[RequestPlan], int, int]:
    clipped, prompts, outputs = [], 0, 0
    for plan in plans:
        if spec.max_prompt_tokens is not None and plan.prompt_tokens > spec.max_prompt_tokens:
            plan = replace(plan, prompt_tokens=spec.max_prompt_tokens)
            prompts += 1
        if spec.max_output_tokens is not None and plan.output_tokens > spec.max_output_tokens:
            plan = replace(plan, output_tokens=spec.max_output_tokens)
            outputs += 1
        clipped.append(plan)
    return clipped, prompts, outputs


def _classes(plans: list[RequestPlan], spec: WorkloadSpec) -> list[RequestPlan]:
    if not spec.class_mix:
        return plans
    names = [name for name, _ in spec.class_mix]
    edges = np.cumsum([weight for _, weight in spec.class_mix])
    picks = np.searchsorted(edges, stream(spec.seed, Stream.CLASSES).random(len(plans)) * edges[-1], side="right")
    return [
        replace(plan, traffic_class=names[min(int(pick), len(names) - 1)])
        for plan, pick in zip(plans, picks, strict=True)
    ]


def _describe_source(source: Source) -> str:
    if isinstance(source, FromDataset):
        return f"dataset {source.name} ({len(source.rows)} prompts)"
    return describe_source(source)
