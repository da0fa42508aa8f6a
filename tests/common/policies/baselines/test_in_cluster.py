"""Every baseline in the virtual cluster: small caches, hand-overs at any position, kills; outputs equal the expected.

The world checks every slot of KV, every plan and every allocator; here also that what each policy is about happened.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cohort.common.config import load_config
from cohort.common.policies import compose
from cohort.common.policies.baselines.placements import Colocated, ColocatedInTurn, Disaggregated
from cohort.common.policies.interface import IterationScheduler, KvAllocator, Placement
from cohort.common.types import KvGeometry, Role, TrafficClass
from tests.common.machines.faults import any_faults
from tests.common.machines.world import VOCABULARY, SplitAnywhere, World
from tests.examples import examples

UNIFIED = {"unified-0": Role.UNIFIED}
UNIFIED_TWICE = {"unified-0": Role.UNIFIED, "unified-1": Role.UNIFIED}
PD_TWICE = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}
BASELINES = {
    "orca": "max",
    "srtf": "max",
    "mlfq": "max",
    "vllm": "paged",
    "chunked_prefill": "paged",
    "round_robin": "paged",
    "multires": "predicted",
    "predicted_batches": "predicted",
}
LARGEST = 70  # positions of the largest request offered: 18 blocks


def world(
    seed: int,
    roles: dict[str, Role],
    placement: Callable[[], Placement],
    name: str,
    *,
    allocation: str = "",
    blocks: int = 64,
    host_blocks: int = 30,
    preemption: str = "recompute",
    caching: bool = False,
    padded: bool = False,
    run_failure_rate: float = 0.0,
) -> World:
    config = load_config(
        overrides={
            "policies": {"iteration": name, "allocation": allocation or BASELINES[name]},
            "engine": {"max_rows": 8, "max_step_tokens": 32, "prefill_chunk": 8, "preemption": preemption},
            "baselines": {"batch_size": 4, "queue_starvation_s": 2.0, "padded": padded},
            "kv": {"prefix_caching": caching},
        }
    )

    def scheduler() -> IterationScheduler:
        return compose.iteration(config)

    def allocator(geometry: KvGeometry, device: int, host: int) -> KvAllocator:
        return compose.allocation(config, geometry, device, host)

    return World(
        seed,
        roles,
        placement,
        blocks=blocks,
        host_blocks=host_blocks,
        scheduler=scheduler,
        allocator=allocator,
        run_failure_rate=run_failure_rate,
    )


def offer(world: World, count: int, over_s: float = 2.0) -> None:
    """Some share a prefix; predictions are wrong in both directions."""
    random = Random(world.random.getrandbits(32))
    prefix = [random.randrange(VOCABULARY) for _ in range(9)]
    for index in range(count):
        prompt = (prefix if random.random() < 0.3 else []) + [
            random.randrange(VOCABULARY) for _ in range(random.randint(1, 31))
        ]
        tokens = random.randint(1, LARGEST - len(prompt)) if random.random() < 0.3 else random.randint(1, 12)
        predicted = max(1.0, tokens * random.choice([0.3, 1.0, 2.0]))
        traffic_class: TrafficClass = "be" if index % 3 else "rt"
        world.at(random.random() * over_s, partial(world.submit, f"r{index}", prompt, tokens, traffic_class, predicted))


def finish(world: World) -> None:
    world.run(4.0)
    world.run_until_quiet()
    world.check_outputs()


def preemptions(world: World) -> int:
    return sum(node.machine.counters.preemptions for node in world.workers.values())


@pytest.mark.parametrize("blocks", [20, 64])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("name", BASELINES)
def test_colocated(name: str, preemption: str, blocks: int) -> None:
    cluster = world(21, UNIFIED, Colocated, name, blocks=blocks, preemption=preemption)
    offer(cluster, 50)
    finish(cluster)
    assert cluster.displaced == 0
    if blocks == 64 and name == "orca":
        assert preemptions(cluster) == 0  # max-allocation never runs out
    if blocks == 20 and name in ("vllm", "chunked_prefill", "round_robin", "srtf", "mlfq"):
        assert preemptions(cluster) > 0


@pytest.mark.parametrize("name", BASELINES)
def test_segments_may_meet_anywhere(name: str) -> None:
    # Not tighter: two workers whose caches are full of granted and of leaving KV may wait for each other, whichever
    # scheduler they have (first come, first served as well).
    cluster = world(22, UNIFIED_TWICE, lambda: SplitAnywhere(22), name, blocks=64, caching=True)
    offer(cluster, 50)
    finish(cluster)
    assert sum(node.machine.counters.transfers_in for node in cluster.workers.values()) > 5


def test_padded_batches_write_behind_their_rows_and_harm_nobody() -> None:
    cluster = world(23, UNIFIED, Colocated, "predicted_batches", blocks=40, padded=True)
    offer(cluster, 50)
    finish(cluster)


def test_vllm_prefills_and_decodes_apart_on_workers_of_their_own() -> None:
    cluster = world(24, PD_TWICE, Disaggregated, "vllm", blocks=40, preemption="swap")
    offer(cluster, 60)
    finish(cluster)
    assert sum(node.machine.counters.transfers_in for node in cluster.workers.values()) > 30


def test_requests_go_to_instances_in_turn() -> None:
    cluster = world(25, UNIFIED_TWICE, ColocatedInTurn, "chunked_prefill")
    offer(cluster, 40)
    finish(cluster)
    counts = [sum(node.machine.counters.finished.values()) for node in cluster.workers.values()]
    assert counts == [20, 20]


@settings(
    max_examples=examples(0.4),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a world shrinks slowly
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(BASELINES)),
    allocation=st.sampled_from(["", "paged", "max", "predicted"]),
    placement=st.sampled_from([Colocated, Disaggregated, SplitAnywhere]),
    preemption=st.sampled_from(["swap", "recompute"]),
    blocks=st.sampled_from([20, 30, 64]),
    host=st.sampled_from([0, 6, 60]),
    caching=st.booleans(),
    padded=st.booleans(),
    failures=st.sampled_from([0.0, 0.1]),
    faults=any_faults(),
)
def test_anything_may_break_at_any_time(
    seed: int,
    name: str,
    allocation: str,
    placement: Callable[[], Placement],
    preemption: str,
    blocks: int,
    host: int,
    caching: bool,
    padded: bool,
    failures: float,
    faults: list[tuple[str, float, float]],
) -> None:
    cluster = world(
        seed,
        PD_TWICE,
        placement,
        name,
        allocation=allocation,
        host_blocks=host,
        preemption=preemption,
        blocks=max(64, blocks) if placement is SplitAnywhere else blocks,  # see test_segments_may_meet_anywhere
        caching=caching,
        padded=padded,
        run_failure_rate=failures,
    )
    offer(cluster, 25)
    for kind, at_s, back_s in faults:
        cluster.at(at_s, partial(cluster.inflict, kind, back_s))
    cluster.run(6.0)
    cluster.run_until_quiet()
    cluster.check_outputs()
