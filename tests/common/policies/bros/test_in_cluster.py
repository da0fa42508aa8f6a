"""BROS in the virtual cluster: caches so small that blocks are shared, KV transfers; outputs equal the expected.

The world checks every slot a row reads, every plan and the allocator; here also that what the paper is about happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, product
from random import Random
from typing import Any

import pytest

from cohort.common.policies.baselines.placements import Colocated
from cohort.common.policies.interface import Placement
from cohort.common.types import Role
from tests.common.machines.clusters import PD_TWICE, UNIFIED, Asked, finish, of_config, offer, small, tokens, total
from tests.common.machines.world import SplitAnywhere, World
from tests.support.kinds import by_default, in_turn


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
    options: dict[str, Any] | None = None,
) -> World:
    config = small(
        "bros",
        {
            "policies": {"iteration": iteration, "allocation": allocation},
            "engine": {"max_rows": 12, "max_step_tokens": 48, "prefill_chunk": 48, "preemption": preemption},
            "bros": options or {},
        },
    )
    return of_config(seed, config, roles, placement, blocks=blocks, host_blocks=host_blocks)


def requests(random: Random) -> Iterator[Asked]:
    for index in count():
        prompt = tokens(random, random.randint(1, 40))
        yield Asked(prompt, random.randint(1, 30), "rt" if index % 2 else "be")


def stats_of(world: World) -> dict[str, float]:
    """Run it to its end, then what the first worker's allocator counted."""
    finish(world)
    kv = next(iter(world.workers.values())).machine.kv
    return kv.metrics()


@pytest.mark.parametrize("blocks", [22, 40, 200])
def test_real_time_requests_move_into_best_effort_blocks(blocks: int) -> None:
    world = bros_world(38, UNIFIED, Colocated, blocks=blocks)
    offer(world, 60, requests)
    stats = stats_of(world)
    assert world.attempts_lost == 0
    assert (stats["shared_blocks_total"] > 0) == (blocks < 200)
    assert (stats["checkpointed_slots_total"] > 0) == (blocks < 200)
    assert stats["restored_slots_total"] <= stats["checkpointed_slots_total"]
    assert (stats["shared_blocks"], stats["checkpointed_slots"]) == (0, 0)


@pytest.mark.parametrize(
    ("allocation", "host_blocks", "preemption"),
    in_turn(product(("bidirectional", "paged"), (0, 2, 60), ("swap", "recompute")), of=2),
)
def test_little_host_memory_or_another_allocator(allocation: str, preemption: str, host_blocks: int) -> None:
    world = bros_world(
        32, UNIFIED, Colocated, allocation=allocation, preemption=preemption, host_blocks=host_blocks, blocks=22
    )
    offer(world, 60, requests)
    finish(world)
    assert world.attempts_lost == 0


@pytest.mark.parametrize(
    "iteration", by_default(["continuous_batching", "round_robin", "vllm", "srtf"], "continuous_batching", "srtf")
)
def test_other_schedulers_over_bidirectional_blocks(iteration: str) -> None:
    world = bros_world(33, UNIFIED, Colocated, iteration=iteration, blocks=26)
    offer(world, 60, requests)
    assert stats_of(world)["shared_blocks_total"] > 0


@pytest.mark.parametrize(
    ("allocation", "options"),
    [("bidirectional", {"group_tokens": 4}), ("bidirectional", {"cut_prompts": False}), ("paged", {"drops": False})],
)
def test_options(allocation: str, options: dict[str, Any]) -> None:
    world = bros_world(34, UNIFIED, Colocated, allocation=allocation, options=options)
    offer(world, 60, requests)
    finish(world)


def test_kv_transfers_at_any_position_are_of_exclusive_blocks() -> None:
    world = bros_world(35, PD_TWICE, lambda: SplitAnywhere(35), blocks=40)
    offer(world, 60, requests)
    finish(world)
    assert total(world, "transfers_in") > 20
