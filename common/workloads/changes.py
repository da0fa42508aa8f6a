"""Workload → workload: clipping, classes, SLOs, mixing.

Pure. Each returns a new workload whose facts name the change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from cohort.common.errors import ConfigError
from cohort.common.types import Slo, TrafficClass
from cohort.common.workloads.arrivals import Arrivals, ClosedLoop, TraceTimes, describe, due_times
from cohort.common.workloads.generate import Stream, stream
from cohort.common.workloads.items import ClosedLoopPart, WorkItem, Workload, WorkloadFacts

_ID_SPACE = 1 << 48
"""Ids of the workloads that are mixed are moved this far apart, so that equal ids of two sources share nothing."""


def clip(
    workload: Workload, *, max_prompt: int | None = None, max_output: int | None = None, max_total: int | None = None
) -> Workload:
    """Cut longer requests to these bounds on tokens, and count them in the facts.

    Cut to `max_total`, the output goes first (a context must hold at least one prompt token), then the prompt, whose
    hash ids are shortened with it.
    """
    bounds = (("max_prompt", max_prompt, 1), ("max_output", max_output, 1), ("max_total", max_total, 2))
    for name, bound, least in bounds:
        if bound is not None and bound < least:
            raise ConfigError(f"{name} is {bound}, must be at least {least}")
    prompts = outputs = 0

    def cut(item: WorkItem) -> WorkItem:
        nonlocal prompts, outputs
        prompt = item.prompt_tokens if max_prompt is None else min(item.prompt_tokens, max_prompt)
        output = item.output_tokens if max_output is None else min(item.output_tokens, max_output)
        if max_total is not None:
            output = min(output, max_total - 1)
            prompt = min(prompt, max_total - output)
        if (prompt, output) == (item.prompt_tokens, item.output_tokens):
            return item
        prompts += prompt < item.prompt_tokens
        outputs += output < item.output_tokens
        ids = item.hash_ids[: -(-prompt // item.hash_block)] if item.hash_ids else ()
        return replace(item, prompt_tokens=prompt, output_tokens=output, hash_ids=ids)

    clipped, facts = _each(workload, cut), workload.facts
    facts = replace(
        facts, clipped_prompts=facts.clipped_prompts + prompts, clipped_outputs=facts.clipped_outputs + outputs
    )
    return replace(clipped, facts=facts)


def with_class(workload: Workload, traffic_class: TrafficClass) -> Workload:
    return _each(workload, lambda item: replace(item, traffic_class=traffic_class))


def with_class_share(workload: Workload, best_effort: float, *, seed: int = 0) -> Workload:
    """Make each open-loop item best-effort with this probability, else real-time."""
    draws = stream(seed, Stream.CLASSES).random(len(workload.items))
    items = tuple(
        replace(item, traffic_class="be" if drawn < best_effort else "rt")
        for item, drawn in zip(workload.items, draws, strict=True)
    )
    return replace(workload, items=items)


def with_slos(workload: Workload, rule: Callable[[WorkItem], Slo]) -> Workload:
    """Give every item the SLO of `rule` (see `slos`)."""
    return _each(workload, lambda item: replace(item, slo=rule(item)))


def together(name: str, workloads: Sequence[Workload]) -> Workload:
    parts = [_apart(workload, index) for index, workload in enumerate(workloads)]
    items = sorted((item for part in parts for item in part.items), key=lambda item: item.arrival_s)
    loops = tuple(loop for part in parts for loop in part.closed_loop)
    return Workload(name, tuple(items), _joined([workload.facts for workload in workloads]), loops)


def mixture(
    name: str, parts: Sequence[tuple[float, Workload]], arrivals: Arrivals, *, count: int, seed: int = 0
) -> Workload:
    """Mix parts into one stream of `count` requests; each is, by weight, the next item of a part (cycled).

    The parts' own arrival times mean nothing here. DynaServe's hybrid workload is two parts of equal weight (§6.4).
    """
    if not parts or any(weight <= 0 or not workload.items for weight, workload in parts):
        raise ConfigError(f"{name}: a mixture needs parts of weights above 0, each with items")
    if isinstance(arrivals, TraceTimes):
        raise ConfigError(f"{name}: a mixture needs arrivals of its own, not a trace's times")
    apart = [_apart(workload, index) for index, (_, workload) in enumerate(parts)]
    edges = np.cumsum([weight for weight, _ in parts])
    draws = stream(seed, Stream.MIXTURE).random(count) * edges[-1]
    picks = np.minimum(np.searchsorted(edges, draws, side="right"), len(parts) - 1)
    taken = [0] * len(parts)
    chosen: list[WorkItem] = []
    for pick in (int(p) for p in picks):
        items = apart[pick].items
        chosen.append(items[taken[pick] % len(items)])
        taken[pick] += 1
    total = float(edges[-1])
    facts = replace(
        _joined([workload.facts for _, workload in parts]),
        arrivals=describe(arrivals),
        seed=seed,
        source="mixture: " + ", ".join(f"{100 * weight / total:.3g} % {w.name}" for weight, w in parts),
    )
    if isinstance(arrivals, ClosedLoop):
        return Workload(name, (), facts, (ClosedLoopPart(arrivals.concurrency, tuple(chosen)),))
    due = due_times(arrivals, count, stream(seed, Stream.ARRIVALS), None) or []
    return Workload(name, tuple(replace(i, arrival_s=at) for i, at in zip(chosen, due, strict=True)), facts)


def _each(workload: Workload, change: Callable[[WorkItem], WorkItem]) -> Workload:
    return replace(
        workload,
        items=tuple(change(item) for item in workload.items),
        closed_loop=tuple(
            replace(part, items=tuple(change(item) for item in part.items)) for part in workload.closed_loop
        ),
    )


def _apart(workload: Workload, index: int) -> Workload:
    """Move hash ids and sessions into a space of their own."""
    if index == 0:
        return workload
    return _each(
        workload,
        lambda item: (
            replace(
                item,
                hash_ids=tuple(index * _ID_SPACE + hash_id for hash_id in item.hash_ids),
                session=f"{index}:{item.session}" if item.session else "",
            )
            if item.hash_ids or item.session
            else item
        ),
    )


def _joined(facts: Sequence[WorkloadFacts]) -> WorkloadFacts:
    return WorkloadFacts(
        source=" + ".join(one.source for one in facts),
        arrivals=" + ".join(one.arrivals for one in facts),
        skipped_rows=sum(one.skipped_rows for one in facts),
        clipped_prompts=sum(one.clipped_prompts for one in facts),
        clipped_outputs=sum(one.clipped_outputs for one in facts),
        notes=tuple(note for one in facts for note in one.notes),
    )
