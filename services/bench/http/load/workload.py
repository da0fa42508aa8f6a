"""The workload: which request is due when, how long it is, what it shares with others. Pure and seeded.

Called by `measuring` once per run; the same spec gives the same plans, on any machine. Contents of prompts are drawn
later (`prompts`) from a second number, the salt, so that a repeated run keeps lengths and arrivals but meets no warm
prefix cache. Every clip and skip is counted in `WorkloadFacts` and stated in the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from cohort.common.errors import ConfigError
from cohort.common.workloads.arrivals import Arrivals, ClosedLoop, RandomArrivals
from cohort.common.workloads.generate import FromTrace, Mixed, Source, Stream, generate, stream


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """Parameters of a workload. `num_requests` None: a trace's length, or what fits in `duration_s`."""

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
    """One request to send. `due_s` None: as soon as a slot is free. `group` labels the component of a mix."""

    index: int
    due_s: float | None
    prompt_tokens: int
    output_tokens: int
    group: str = ""
    traffic_class: str = ""
    hash_ids: tuple[int, ...] = ()
    session: str = ""


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
    """Draw lengths, then arrivals, then classes; each from its own random stream."""
    made = generate(
        "the workload",
        spec.source,
        spec.arrivals,
        count=_count(spec),
        duration_s=spec.duration_s,
        seed=spec.seed,
        hash_block=1,  # `prompts` knows the tokens of a hash id
    )
    items = made.closed_loop[0].items if made.closed_loop else made.items
    classes = _classes(spec, len(items))
    most_prompt, most_output = spec.max_prompt_tokens or np.inf, spec.max_output_tokens or np.inf
    plans = tuple(
        RequestPlan(
            index,
            None if made.closed_loop else item.arrival_s,
            int(min(item.prompt_tokens, most_prompt)),
            int(min(item.output_tokens, most_output)),
            f"{item.prompt_tokens}x{item.output_tokens}" if isinstance(spec.source, Mixed) else "",
            traffic_class,
            item.hash_ids,
            item.session,
        )
        for index, (item, traffic_class) in enumerate(zip(items, classes, strict=True))
    )
    span_s = plans[-1].due_s if plans else None
    facts = WorkloadFacts(
        arrivals=made.facts.arrivals,
        source=made.facts.source,
        requests=len(plans),
        seed=spec.seed,
        prompt_tokens=sum(plan.prompt_tokens for plan in plans),
        output_tokens=sum(plan.output_tokens for plan in plans),
        offered_requests_per_s=(len(plans) - 1) / span_s if span_s else None,
        clipped_prompts=sum(item.prompt_tokens > most_prompt for item in items),
        clipped_outputs=sum(item.output_tokens > most_output for item in items),
        skipped_rows=made.facts.skipped_rows,
        shares_prefixes=any(plan.hash_ids or plan.session for plan in plans),
    )
    return Workload(plans, spec.arrivals, facts)


def _count(spec: WorkloadSpec) -> int | None:
    if spec.num_requests is not None or isinstance(spec.source, FromTrace):
        return spec.num_requests
    if spec.duration_s is not None and isinstance(spec.arrivals, ClosedLoop):
        raise ConfigError("--duration-s with --concurrency needs --num-requests as the upper bound")
    return None if spec.duration_s is not None and isinstance(spec.arrivals, RandomArrivals) else 100


def _classes(spec: WorkloadSpec, count: int) -> list[str]:
    if not spec.class_mix:
        return [""] * count
    names = [name for name, _ in spec.class_mix]
    edges = np.cumsum([weight for _, weight in spec.class_mix])
    picks = np.searchsorted(edges, stream(spec.seed, Stream.CLASSES).random(count) * edges[-1], side="right")
    return [names[min(int(pick), len(names) - 1)] for pick in picks]
