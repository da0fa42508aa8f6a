"""A machine whose own process did not run takes no peer for dead: what they sent meanwhile is read after it."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from cohort.common.machines.events import Received, Tick
from cohort.common.machines.machine import own_stall_s
from cohort.common.messages import GatewayHello, ManagerHello
from cohort.common.policies.baselines.placements import Disaggregated
from cohort.common.virtual_cluster.cluster import MANAGER
from tests.common.machines import clusters
from tests.common.machines.clusters import PD, Asked, finish, tokens
from tests.common.machines.small_gateway import Gateway, sent
from tests.common.machines.world import World
from tests.support.kinds import by_default


def long_requests(random: Random) -> Iterator[Asked]:
    while True:
        yield Asked(tokens(random, random.randint(1, 20)), 400)


def world_of() -> World:
    world = World(3, PD, Disaggregated, blocks=2000, load_interval_s=0.2)
    clusters.offer(world, 12, long_requests, over_s=4.0)
    return world


def test_a_stall_is_the_time_beyond_what_the_host_was_asked_for() -> None:
    assert own_stall_s(8.0, 1.0, 1.5, 0.5) == 6.5
    assert own_stall_s(8.0, 2.0, 1.5, 0.5) == 6.0
    assert own_stall_s(8.0, 2.0, 7.5, 0.5) == own_stall_s(8.0, 8.0, 1.5, 0.5) == 0.0
    assert own_stall_s(8.0, 2.0, None, 0.5) == own_stall_s(8.0, 2.0, float("inf"), 0.5) == 0.0


@pytest.mark.parametrize("stalled_s", by_default([2.5, 4.0, 6.0, 20.0], 4.0, 20.0))
def test_a_manager_that_was_stopped_loses_no_worker_and_no_attempt(stalled_s: float) -> None:
    world = world_of()
    world.at(2.5, lambda: world.inflict(f"freeze {MANAGER}", stalled_s))
    finish(world, 4.0 + stalled_s)
    assert world.manager.counters.workers_lost == 0
    assert world.manager.counters.attempts_lost == 0


def test_a_gateway_that_was_stopped_asks_no_standby_to_lead() -> None:
    gateway = Gateway(standbys=("manager-1",))
    gateway.live(3.0)
    gateway.tell(Received("manager-1", ManagerHello(2, 0, False)))
    gateway.now_s += 1.2
    assert not [hello for hello in sent(GatewayHello, gateway.tell(Tick())) if hello.lead]
    gateway.until(gateway.now_s + 1.0)
    assert [hello for hello in sent(GatewayHello, gateway.effects, "manager-1") if hello.lead], "a dead leader"


def test_a_worker_that_dies_with_its_manager_is_not_waited_for_twice() -> None:
    """The next manager never had its connection; that it does not register while another one does says enough."""
    world = world_of()
    world.at(2.5, lambda: world.kill_manager(0.3))
    world.at(2.5, lambda: world.kill_worker("decode-0", 30.0))
    finish(world, 12.0)
    cut = [owned for owned in world.owned.values() if owned.times_s[0] < 2.5 and (owned.ended_s or 0.0) > 2.6]
    assert cut and max(owned.next_token_s(2.6) for owned in cut) < 2.5 + 0.3 + 1.0 + 0.2


def test_a_worker_that_dies_while_its_manager_is_stopped_is_found_afterwards() -> None:
    world = world_of()
    world.at(2.5, lambda: world.inflict(f"freeze {MANAGER}", 4.0))
    world.at(3.0, lambda: world.inflict("decode-0", 30.0))
    world.run(6.5 + 3.0 + 0.2)
    assert world.manager.counters.workers_lost == 1
    finish(world, 12.0)
