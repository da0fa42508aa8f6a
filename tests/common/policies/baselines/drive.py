"""Sequences made by hand, and what engine and machine do with a plan; for tests of schedulers without a cluster."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary
from zlib import crc32

from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.baselines.reserved_allocation import Reservation, ReservedAllocator
from cohort.common.policies.interface import IterationPlan, IterationScheduler, News, Ran
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Sequence
from cohort.common.types import Attempt, KvGeometry, Request, SamplingParams, TrafficClass

BLOCK = 4
GEOMETRY = KvGeometry(1, 1, 1, 1, BLOCK)


def sequence(
    name: str,
    prompt: int,
    *,
    arrived_s: float = 0.0,
    max_tokens: int = 8,
    predicted: float = 8.0,
    priority: int = 0,
    traffic_class: TrafficClass = "rt",
    end: int | None = None,
) -> Sequence:
    tokens = [crc32(name.encode()) % 1000 + position for position in range(prompt)]
    request = Request(
        Attempt(name, 1),
        "gateway",
        tokens,
        prompt,
        SamplingParams(max_tokens=max_tokens),
        0.0,
        priority=priority,
        traffic_class=traffic_class,
    )
    return Sequence(request, list(tokens), end, 0, arrived_s, predicted=predicted)


def cache(blocks: int, host: int = 0, reservation: Reservation | None = None, *, caching: bool = False) -> KvAllocator:
    if reservation is None:
        return PagedAllocator(GEOMETRY, blocks, host, prefix_caching=caching)
    return ReservedAllocator(GEOMETRY, blocks, host, reservation=reservation, prefix_caching=caching)


def rows(plan: IterationPlan) -> list[tuple[str, int, int]]:
    return [(row.sequence.request_id, row.start, row.count) for row in plan.rows]


def names(plan: IterationPlan) -> list[str]:
    return [row.sequence.request_id for row in plan.rows]


def run(plan: IterationPlan, kv: KvAllocator) -> None:
    """Compute, and sample a token where the last known one was reached."""
    for row in plan.rows:
        row.sequence.computed = row.start + row.count
        if row.sequence.computed == row.sequence.known:
            row.sequence.tokens.append(1)
        kv.committed(row.sequence)


_ran: WeakKeyDictionary[IterationScheduler, Ran] = WeakKeyDictionary()
"""What the next decision is to be told."""


def ran(policy: IterationScheduler, plan: IterationPlan, now_s: float, *times_s: float) -> None:
    """As far as the policy knows, this plan ran; see `decide`."""
    if plan.rows or plan.copies:
        _ran[policy] = Ran(plan, now_s, times_s)


def decide(
    policy: IterationScheduler, kv: KvAllocator, now_s: float, *, arriving: int = 0, revised: Seq[Sequence] = ()
) -> IterationPlan:
    """As the worker machine asks: told what ran since, and all copies taken."""
    plan = policy.decide(now_s, kv, News(_ran.pop(policy, None), revised, arriving))
    plan.copies = kv.take_copies()
    return plan


def step(
    policy: IterationScheduler,
    kv: KvAllocator,
    now_s: float = 0.0,
    latency_s: float = 0.0,
    *,
    revised: Seq[Sequence] = (),
) -> IterationPlan:
    """Decide and compute."""
    plan = decide(policy, kv, now_s, revised=revised)
    ran(policy, plan, now_s, latency_s)
    run(plan, kv)
    return plan


def leave(policy: IterationScheduler, kv: KvAllocator, gone: Sequence) -> None:
    policy.remove(0.0, gone)
    kv.release(gone.key)
