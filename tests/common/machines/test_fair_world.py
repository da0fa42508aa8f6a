"""Fair sharing in virtual time: gateway, manager and workers as they are live, clients with keys of their own."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from cohort.common.machines.events import Offered
from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.baselines.pass_through import PassThrough
from cohort.common.policies.baselines.placements import Colocated
from cohort.common.policies.fair_order import FairOrder
from cohort.common.policies.interface import PrefillOrder
from cohort.common.types import Role
from cohort.common.virtual_cluster.cluster import GATEWAY
from tests.common.machines.world import NO_SLO, World
from tests.support.kinds import by_default

ROLES = {"unified-0": Role.UNIFIED, "unified-1": Role.UNIFIED}
AHEAD = 64
MAX_TOKENS = 12


def fair(order: Callable[[], PrefillOrder] = lambda: Fcfs(dispatch_ahead_tokens=AHEAD)) -> FairOrder:
    inside = order()
    alone = 4 * AHEAD if isinstance(inside, PassThrough) else None
    return FairOrder(inside, ahead_tokens=AHEAD, default_output=8, alone_tokens=alone)


def world(order: Callable[[], PrefillOrder]) -> World:
    made = World(7, ROLES, Colocated, order=order, caching=False)
    made.run(2.0)
    return made


def ask(world: World, owner: str, count: int, *, weight: float = 1.0, first: int = 0) -> list[str]:
    """So many requests of one key, at once."""
    names = [f"{owner}{number}" for number in range(first, first + count)]
    for number, name in enumerate(names):
        prompt = [3 + (ord(owner) * 31 + number * 7 + place) % 40 for place in range(24)]
        request = world._request(name, prompt, MAX_TOKENS, "rt", 0.0, NO_SLO, "")
        request = msgspec.structs.replace(request, owner=owner, weight=weight)
        world.cluster.feed(world.cluster.nodes[GATEWAY], Offered(name, [request], owner=owner))
    return names


def first_tokens_s(world: World, names: list[str]) -> list[float]:
    return sorted(float(world.owned[name].first_token_s or "inf") for name in names)


def served(world: World) -> dict[str, tuple[list[float], float | None]]:
    """Of every request of one key's traffic, when its tokens came and when it ended."""
    for burst in range(4):
        world.at(burst * 0.7, lambda burst=burst: ask(world, "a", 12, first=12 * burst))  # type: ignore[misc]
    world.run(world.now_s + 3.0)
    world.run_until_quiet()
    world.check_outputs()
    return {name: (owned.times_s, owned.ended_s) for name, owned in world.owned.items()}


@pytest.mark.parametrize("order", [lambda: Fcfs(dispatch_ahead_tokens=AHEAD), PassThrough], ids=["fcfs", "through"])
def test_one_key_is_served_to_the_moment_as_without_shares(order: Callable[[], PrefillOrder]) -> None:
    assert served(world(lambda: fair(order))) == served(world(order))


@pytest.mark.parametrize("order", [lambda: Fcfs(dispatch_ahead_tokens=AHEAD), PassThrough], ids=["fcfs", "through"])
def test_a_flood_of_one_key_does_not_delay_another(order: Callable[[], PrefillOrder]) -> None:
    def delays(made: World) -> tuple[float, float]:
        flood = ask(made, "a", 150)
        made.run(made.now_s + 0.1)
        asked_s, few = made.now_s, ask(made, "b", 5)
        made.run_until_quiet()
        made.check_outputs()
        return first_tokens_s(made, few)[-1] - asked_s, first_tokens_s(made, flood)[-1] - asked_s

    unfair_b_s, unfair_a_s = delays(world(order))
    b_s, a_s = delays(world(lambda: fair(order)))
    assert unfair_b_s > 0.9 * unfair_a_s  # behind all of the flood
    assert b_s < 0.25 * unfair_b_s
    assert a_s < 1.1 * unfair_a_s  # the flood is not slower for it: no worker idled


@pytest.mark.parametrize("weight", by_default([1.0, 3.0], 3.0))
def test_shares_follow_weights_while_both_wait(weight: float) -> None:
    made = world(fair)
    ask(made, "a", 120)
    ask(made, "b", 120, weight=weight)
    done: list[dict[str, int]] = []
    for ended in (20, 100):  # of the first, some were on their way before the second key came
        made.run(made.now_s + 400.0, lambda: sum(owned.over for owned in made.owned.values()) >= ended)  # noqa: B023
        done.append({key: sum(owned.over for name, owned in made.owned.items() if name[0] == key) for key in "ab"})
    shares = {key: done[1][key] - done[0][key] for key in "ab"}
    assert shares["b"] / shares["a"] == pytest.approx(weight, rel=0.2)
    made.run_until_quiet()
    made.check_outputs()


@pytest.mark.parametrize("fault", by_default(["manager", "unified-0", "crash unified-1"], "manager", "crash unified-1"))
def test_shares_survive_faults(fault: str) -> None:
    made = world(fair)
    ask(made, "a", 60)
    ask(made, "b", 60)
    made.at(0.4, lambda: made.inflict(fault, 1.0))
    made.at(0.6, lambda: [made.cancel(f"a{number}") for number in range(30, 40)])
    made.run_until_quiet()
    made.check_outputs()
