"""AlignedServe in the virtual cluster, and views of a cluster for its policies alone."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

from cohort.common.config import AlignedServeAblation, AlignedServeConfig
from cohort.common.policies.alignedserve.aligned_batching import AlignedBatching
from cohort.common.policies.alignedserve.aligned_binding import AlignedBinding
from cohort.common.policies.alignedserve.late_bound import LateBound
from cohort.common.policies.interface import ClusterView, InstanceView, ParkedKv
from cohort.common.types import Attempt, Request, Role, SamplingParams, Slo, WorkerCapacity, WorkerFigures
from tests.common.machines.world import VOCABULARY, World

PD = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE}
PD_TWICE = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}


def world(
    seed: int,
    roles: dict[str, Role] = PD_TWICE,
    *,
    preemption: str = "recompute",
    starvation_s: float = 2.0,
    prefetch: bool = True,
    aligned: bool = True,
    **options: Any,
) -> World:
    config = AlignedServeConfig(
        batch_share=0.4,
        least_requests=2,
        leaf_tokens=4,
        starvation_s=starvation_s,
        ablation=AlignedServeAblation(prefetch=prefetch, aligned=aligned),
    )
    return World(
        seed,
        roles,
        lambda: LateBound(config),
        late_binding=lambda: AlignedBinding(config, default_output=256.0),
        scheduler=lambda: AlignedBatching(max_rows=8, max_step_tokens=32, prefill_chunk=8, preemption=preemption),  # type: ignore[arg-type]
        **options,
    )


def offer(world: World, count: int, over_s: float = 2.0) -> None:
    """Three in ten are long."""
    random = Random(world.random.getrandbits(32))
    for index in range(count):
        length = random.randint(25, 60) if random.random() < 0.3 else random.randint(1, 12)
        prompt = [random.randrange(VOCABULARY) for _ in range(length)]
        world.at(random.random() * over_s, partial(world.submit, f"r{index}", prompt, random.randint(1, 30)))


def finish(world: World) -> None:
    world.run(6.0)
    world.run_until_quiet()
    world.check_outputs()


def total(world: World, counter: str) -> int:
    return sum(int(getattr(node.machine.counters, counter)) for node in world.workers.values())


def view(name: str, role: Role, **figures: Any) -> InstanceView:
    """A worker of 100 blocks of 16 tokens and 64 rows."""
    capacity = WorkerCapacity(role, "m", 10_000, 1, 1, 1, 1, 16, 100, 100, 64, 2048)
    return InstanceView(name, capacity, WorkerFigures(**{"total_blocks": 100, "free_blocks": 100, **figures}))


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
