"""BROS in the virtual cluster: caches so small that blocks are shared, hand-overs, kills; outputs equal the expected.

The world checks every slot a row reads, every plan and the allocator; here also that what the paper is about happened.
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
from cohort.common.policies.baselines.placements import Colocated, Disaggregated
from cohort.common.policies.interface import IterationScheduler, KvAllocator, Placement
from cohort.common.types import KvGeometry, Role
from tests.common.machines.faults import any_faults
from tests.common.machines.world import VOCABULARY, SplitAnywhere, World
from tests.examples import examples

UNIFIED = {"unified-0": Role.UNIFIED}
PD_TWICE = {"prefill-0": Role.PREFILL, "prefill-1": Role.PREFILL, "decode-0": Role.DECODE, "decode-1": Role.DECODE}


def bros_world(
    seed: int,
    roles: dict[str, Role],
    placement: Callable[[], Placement],
    *,
    iteration: str = "slack_packing",
    allocation: str = "bidirectional",
    blocks: int = 24,
    host_blocks: int = 60,
    preemption: str = "swap",
    run_failure_rate: float = 0.0,
    options: dict[str, float] | None = None,
) -> World:
    config = load_config(
        overrides={
            "policies": {"iteration": iteration, "allocation": allocation},
            "engine": {"max_rows": 12, "max_step_tokens": 48, "prefill_chunk": 48, "preemption": preemption},
            "gateway": {"rt_ttft_slo_s": 0.3, "rt_tpot_slo_s": 0.08},
            "bros": {
                "first_batch": 4,
                "batch_step": 2,
                "rt_starvation_s": 1.0,
                "be_starvation_s": 2.0,
                **(options or {}),
            },
            "kv": {"prefix_caching": False},
        }
    )
    compose.check_names(config)

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
    random = Random(world.random.getrandbits(32))
    for index in range(count):
        prompt = [random.randrange(VOCABULARY) for _ in range(random.randint(1, 40))]
        tokens = random.randint(1, 30)
        world.at(
            random.random() * over_s, partial(world.submit, f"r{index}", prompt, tokens, "rt" if index % 2 else "be")
        )


def finish(world: World) -> dict[str, float]:
    world.run(4.0)
    world.run_until_quiet()
    world.check_outputs()
    kv = next(iter(world.workers.values())).machine.kv
    return kv.figures()


@pytest.mark.parametrize("blocks", [22, 40, 200])
def test_real_time_requests_move_into_best_effort_blocks(blocks: int) -> None:
    world = bros_world(31, UNIFIED, Colocated, blocks=blocks)
    offer(world, 60)
    figures = finish(world)
    assert world.displaced == 0
    assert (figures["shared_blocks_total"] > 0) == (blocks < 200)
    assert (figures["checkpointed_slots_total"] > 0) == (blocks < 200)
    assert figures["restored_slots_total"] <= figures["checkpointed_slots_total"]
    assert (figures["shared_blocks"], figures["checkpointed_slots"]) == (0, 0)


@pytest.mark.parametrize("host_blocks", [0, 2, 60])
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("allocation", ["bidirectional", "paged"])
def test_little_host_memory_or_another_allocator(allocation: str, preemption: str, host_blocks: int) -> None:
    world = bros_world(
        32, UNIFIED, Colocated, allocation=allocation, preemption=preemption, host_blocks=host_blocks, blocks=22
    )
    offer(world, 60)
    finish(world)
    assert world.displaced == 0


@pytest.mark.parametrize("iteration", ["continuous_batching", "round_robin", "vllm", "srtf"])
def test_other_schedulers_over_bidirectional_blocks(iteration: str) -> None:
    world = bros_world(33, UNIFIED, Colocated, iteration=iteration, blocks=26)
    offer(world, 60)
    assert finish(world)["shared_blocks_total"] > 0


@pytest.mark.parametrize("options", [{"group_tokens": 4}, {"cut_prompts": False}])
def test_options(options: dict[str, float]) -> None:
    world = bros_world(34, UNIFIED, Colocated, options=options)
    offer(world, 60)
    finish(world)


def test_hand_overs_at_any_position_are_of_exclusive_blocks() -> None:
    world = bros_world(35, PD_TWICE, lambda: SplitAnywhere(35), blocks=40)
    offer(world, 60)
    finish(world)
    assert sum(node.machine.counters.transfers_in for node in world.workers.values()) > 20


@settings(
    max_examples=examples(0.3),
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a world shrinks slowly
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32),
    iteration=st.sampled_from(["slack_packing", "slack_packing", "continuous_batching", "round_robin"]),
    placement=st.sampled_from([Colocated, Disaggregated, SplitAnywhere]),
    preemption=st.sampled_from(["swap", "recompute"]),
    blocks=st.sampled_from([20, 26, 64]),
    host=st.sampled_from([0, 4, 60]),
    failures=st.sampled_from([0.0, 0.1]),
    faults=any_faults(),
)
def test_anything_may_break_at_any_time(
    seed: int,
    iteration: str,
    placement: Callable[[], Placement],
    preemption: str,
    blocks: int,
    host: int,
    failures: float,
    faults: list[tuple[str, float, float]],
) -> None:
    world = bros_world(
        seed,
        PD_TWICE,
        placement,
        iteration=iteration,
        blocks=blocks,
        host_blocks=host,
        preemption=preemption,
        run_failure_rate=failures,
    )
    offer(world, 30)
    for kind, at_s, back_s in faults:
        world.at(at_s, partial(world.inflict, kind, back_s, cancelled=8))
    world.run(6.0)
    world.run_until_quiet()
    world.check_outputs()
