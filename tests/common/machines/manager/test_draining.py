"""A worker that drains while others are there: what runs on it goes on at another one, with its KV, within a moment."""

from __future__ import annotations

from random import Random

import pytest

from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.baselines.placements import Colocated, Disaggregated
from cohort.common.types import Role
from tests.common.machines.clusters import PD, PD_TWICE, UNIFIED_TWICE, total
from tests.common.machines.world import VOCABULARY, World, expected_output

LONG = 200


class Moving(Colocated):
    """One worker for all of a request, with links to the others."""

    moves_kv = True


def world_of(
    roles: dict[str, Role],
    placement: type[Colocated | Disaggregated],
    requests: int,
    *,
    blocks: int = 1024,
    most: int = LONG,
) -> World:
    """With so many requests of some hundred tokens, which have just begun. An iteration takes 10 ms."""
    world, random = World(3, roles, placement, blocks=blocks, order=all_at_once), Random(3)
    world.run(1.7)
    for index in range(requests):
        world.submit(f"r{index}", long_prompt(random), most)
    world.run(1.9)
    return world


def all_at_once() -> Fcfs:
    """Nothing waits in the manager."""
    return Fcfs(dispatch_ahead_tokens=100_000)


def long_prompt(random: Random) -> list[int]:
    """One whose response is long."""
    while True:
        prompt = [random.randrange(VOCABULARY) for _ in range(random.randint(8, 40))]
        if len(expected_output(prompt, LONG)) >= 80:
            return prompt


def finish(world: World) -> None:
    world.run_until_quiet()
    world.check_outputs()


@pytest.mark.parametrize(
    ("roles", "placement", "drained"),
    [(PD_TWICE, Disaggregated, "decode-0"), (UNIFIED_TWICE, Moving, "unified-0"), (PD, Disaggregated, "decode-0")],
)
def test_what_runs_goes_on_elsewhere_and_nothing_is_computed_again(
    roles: dict[str, Role], placement: type[Colocated | Disaggregated], drained: str
) -> None:
    world = world_of(roles, placement, 6)
    there = [sequence.request_id for sequence in world.workers[drained].worker.sequences()]
    assert len(there) >= 2, "nothing is there to be moved"
    incoming = total(world, "transfers_in")
    world.drain_worker(drained, 60.0)
    world.run(world.now_s + 0.4)
    assert not any(world.owned[name].over for name in there), "these had to be moved"
    assert not world.workers[drained].alive or world.workers[drained].worker.idle
    assert total(world, "transfers_in") - incoming >= len(there)
    finish(world)
    assert world.attempts_lost == 0


def test_prompts_that_have_not_begun_are_placed_anew() -> None:
    """With more of them than rows: the others have computed nothing that could be moved."""
    world = world_of(UNIFIED_TWICE, Moving, 40, most=50)
    waiting = [s.request_id for s in world.workers["unified-0"].worker.sequences() if not s.computed]
    assert waiting
    world.drain_worker("unified-0", 60.0)
    finish(world)
    assert 0 < world.attempts_lost <= len(waiting) + 2


def test_the_only_worker_finishes_what_it_has() -> None:
    world = world_of({"unified-0": Role.UNIFIED}, Moving, 3)
    world.drain_worker("unified-0", 60.0)
    finish(world)
    assert world.attempts_lost == 0


def test_a_worker_without_links_finishes_what_it_has() -> None:
    world = world_of(UNIFIED_TWICE, Colocated, 6)
    assert not Colocated.moves_kv
    world.drain_worker("unified-0", 60.0)
    finish(world)
    assert world.attempts_lost == 0 and total(world, "transfers_in") == 0


def test_where_no_other_has_the_blocks_the_rest_stays_and_ends_with_the_drain() -> None:
    """Each cache holds four of them; so the other one cannot take four more."""
    world = world_of(UNIFIED_TWICE, Moving, 8, blocks=4 * (LONG + 64) // 4)
    world.drain_worker("unified-0", 1.0)
    finish(world)
