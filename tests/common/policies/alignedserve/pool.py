"""AlignedServe in the virtual cluster, and views of a cluster for its policies alone."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from cohort.common.policies.interface import ClusterView, InstanceView, ParkedKv
from cohort.common.types import Attempt, Request, Role, SamplingParams, Slo, WorkerCapacity, WorkerStats
from tests.common.machines.clusters import PD_TWICE, Asked, of_config, small, tokens
from tests.common.machines.world import World


def world(
    seed: int,
    roles: dict[str, Role] = PD_TWICE,
    *,
    preemption: str = "recompute",
    starvation_s: float = 2.0,
    prefetch: bool = True,
    aligned: bool = True,
    iteration: str = "aligned_batching",
    **options: Any,
) -> World:
    """The preset's policies; `options` are the world's."""
    switches = {"starvation_s": starvation_s, "prefetch": prefetch, "aligned": aligned}
    overrides = {"engine": {"preemption": preemption}, "alignedserve": switches, "policies": {"iteration": iteration}}
    config = small("alignedserve", overrides)
    return of_config(seed, config, roles, **options)


def requests(random: Random) -> Iterator[Asked]:
    """Three in ten are long."""
    while True:
        length = random.randint(25, 60) if random.random() < 0.3 else random.randint(1, 12)
        prompt = tokens(random, length)
        yield Asked(prompt, random.randint(1, 30))


def view(name: str, role: Role, **stats: Any) -> InstanceView:
    """A worker of 100 blocks of 16 tokens and 64 rows."""
    capacity = WorkerCapacity(role, "m", 10_000, 1, 1, 1, 1, 16, 100, 100, 64, 2048)
    return InstanceView(name, capacity, WorkerStats(**{"total_blocks": 100, "free_blocks": 100, **stats}))


def cluster(*views: InstanceView) -> ClusterView:
    return ClusterView({each.instance: each for each in views})


def request(name: str, prompt: int = 20, *, max_tokens: int = 50, tpot_s: float = 0.0) -> Request:
    return Request(
        Attempt(name, 1),
        "gateway",
        [1] * prompt,
        prompt,
        SamplingParams(max_tokens=max_tokens),
        0.0,
        slo=Slo(tpot_s=tpot_s),
    )


def parked(name: str, positions: int, since_s: float = 0.0, at: str = "prefill-0") -> ParkedKv:
    return ParkedKv(request(name, positions), at, positions, since_s)
