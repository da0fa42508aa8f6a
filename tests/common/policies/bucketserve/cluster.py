"""Clusters and waiting requests for the tests of these policies."""

from __future__ import annotations

from typing import Any

from cohort.common.policies.bucketserve.controller import BatchController
from cohort.common.policies.bucketserve.demand import DemandRule
from cohort.common.policies.bucketserve.prefill_order import BucketedPrefill
from cohort.common.policies.interface import ClusterView, InstanceView, WaitingRequest
from cohort.common.policies.settings import BucketServeSettings
from cohort.common.types import (
    Attempt,
    Prediction,
    QueuedWork,
    Request,
    Role,
    SamplingParams,
    WorkerCapacity,
    WorkerStats,
)

BLOCK = 4


def view(
    name: str,
    role: Role,
    *,
    blocks: int = 100,
    free: int | None = None,
    queued: int = 0,
    running: int = 0,
    queue: list[QueuedWork] | None = None,
    step: int = 512,
    limit: int = 1024,
    memory: int = 0,
    age_s: float = 0.0,
) -> InstanceView:
    capacity = WorkerCapacity(role, "m", limit, 2, 1, 8, 2, BLOCK, blocks, 0, 64, step)
    stats = WorkerStats(
        total_blocks=blocks,
        free_blocks=blocks if free is None else free,
        queued_prefill_tokens=queued,
        running=running or len(queue or []),
        queue=queue or [],
        memory_free_bytes=memory,
    )
    return InstanceView(name, capacity, stats, report_age_s=age_s)


def cluster(*views: InstanceView, **stats: float) -> ClusterView:
    return ClusterView({v.instance: v for v in views}, **stats)


def pair(**decode: Any) -> ClusterView:
    """One prefill worker with plenty of memory, one decode worker."""
    return cluster(view("p0", Role.PREFILL, blocks=1000), view("d0", Role.DECODE, **decode))


def waiting(
    name: str,
    prompt: int = 16,
    output: int = 4,
    *,
    max_tokens: int = 100,
    arrival_s: float = 0.0,
    online: bool = True,
    priority: int = 0,
) -> WaitingRequest:
    prediction = Prediction(output, output, output, output)
    request = Request(
        Attempt(name, 1),
        "g",
        [0] * prompt,
        prompt,
        SamplingParams(max_tokens=max_tokens),
        arrival_s,
        online=online,
        priority=priority,
        prediction=prediction,
    )
    return WaitingRequest(request, arrival_s, prediction)


def demand_rule(**options: float) -> DemandRule:
    return DemandRule(**{"default_output": 8.0, **options})


def controller(
    *,
    max_batch: int = 64,
    ahead: int = 512,
    activation_bytes: int = 0,
    padded: bool = False,
    demand: DemandRule | None = None,
    staging: float = 0.0,
) -> BatchController:
    return BatchController(
        BucketServeSettings(max_batch=max_batch, activation_bytes=activation_bytes),
        dispatch_ahead_tokens=ahead,
        demand=demand or demand_rule(blind_share=0.0),
        padded=padded,
        staging_share=staging,
    )


def order(queue: BucketServeSettings | None = None, **options: object) -> BucketedPrefill:
    return BucketedPrefill(queue or BucketServeSettings(), controller(**options))  # type: ignore[arg-type]
