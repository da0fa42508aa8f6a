"""Several managers: one leads, the others stand by. Whatever is killed, stopped or cut off: every token once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.machines.effects import ManagerEffect, Send, WorkerEffect
from cohort.common.machines.events import Received, ReportDue, Tick
from cohort.common.machines.gateway.peers import STANDBY_HELLO_INTERVAL_S, ManagerLink
from cohort.common.machines.manager.leadership import MOST_MANAGERS, Leadership
from cohort.common.machines.manager.manager import ManagerMachine, ManagerSettings
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import (
    AttemptsLost,
    Cancel,
    ClusterLoad,
    GatewayHello,
    ManagerHello,
    Message,
    Outstanding,
    Placed,
    Registered,
    RegisterWorker,
    StartSegment,
    Submit,
    WorkerReport,
)
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.baselines.placements import Colocated, Disaggregated
from cohort.common.policies.interface import Placement
from cohort.common.types import Attempt, Request, Role, SamplingParams, Segment, WorkerCapacity, WorkerStats
from cohort.common.virtual_cluster.cluster import GATEWAY
from tests.common.machines import clusters, small_worker
from tests.common.machines.clusters import PD, PD_TWICE, Asked, finish, strike, submit_at, tokens
from tests.common.machines.faults import Fault, any_faults
from tests.common.machines.world import SplitAnywhere, World
from tests.examples import of_worlds
from tests.support.kinds import by_default

CAPACITY = WorkerCapacity(Role.UNIFIED, "m", 1000, 1, 1, 1, 1, 16, 100, 0, 64, 512)
A, B, C = "manager", "manager-1", "manager-2"
EPOCH = 7 * MOST_MANAGERS + 1
"""Of a second manager that leads first, with incarnation 7."""


def request(name: str, number: int = 0) -> Request:
    return Request(Attempt(name, number), "g", [1, 2, 3], 3, SamplingParams(max_tokens=5), 0.0)


def said(effects: list[ManagerEffect] | list[WorkerEffect]) -> list[tuple[str, Message]]:
    return [(effect.peer, effect.message) for effect in effects if isinstance(effect, Send)]


# -- a manager ------------------------------------------------------------------------------------------------------


def standby(rank: int = 1) -> ManagerMachine:
    settings = ManagerSettings(3.0, 2.0, 0.5, 10, rank, 2)
    return ManagerMachine(B, 7, settings, Fcfs(dispatch_ahead_tokens=1000), Colocated(), None, 0.0)


def greet(epoch: int = 0, *, lead: bool = False) -> Received:
    return Received("g", GatewayHello("g", 1, "at-g", ["u"], epoch, lead))


def register(epoch: int = 0) -> Received:
    return Received("u", RegisterWorker("u", 1, "at-u", CAPACITY, [], epoch=epoch))


def leading() -> ManagerMachine:
    found = standby()
    found.handle(0.0, greet(), register(), Tick())
    found.handle(0.1, greet(lead=True), register(EPOCH))
    assert found.leads
    return found


def test_a_standby_knows_who_is_there_and_decides_nothing() -> None:
    found = standby()
    answers = found.handle(0.0, greet(40), register(40), Tick())
    assert said(answers) == [("g", ManagerHello(7, 40, False)), ("u", Registered(7, 40, False))]
    assert (found.workers, found.leads, found.stats()["leads"]) == (1, False, 0.0)
    submitted = found.handle(0.1, Received("g", Submit(request("a"))), Received("g", Outstanding([Attempt("b", 0)])))
    assert said(submitted) == [("g", ManagerHello(7, 40, False))] * 2, "they take it for the one that leads"
    for tenth in range(50):  # nobody owns what the worker has, as far as a standby can know
        held = RegisterWorker("u", 1, "at-u", CAPACITY, [Attempt("b", 0)])
        assert said(found.handle(1.0 + tenth / 10, Received("u", held), Tick())) == [("u", Registered(7, 40, False))]
    found.check()


def test_a_standby_that_is_asked_leads_as_a_manager_that_was_started_again() -> None:
    found = standby()
    found.handle(0.0, greet(), register(), Received("other", GatewayHello("other", 1, "at-other")), Tick())
    hello = ManagerHello(7, EPOCH)
    assert said(found.handle(5.0, greet(lead=True))) == [("u", hello), ("other", hello), ("g", hello)]
    assert said(found.handle(5.01, Received("g", Submit(request("a"))))) == [], "until its workers have registered anew"
    assert said(found.handle(5.02, register(EPOCH))) == [("u", Registered(7, EPOCH))]
    (start, placed, load) = said(found.handle(5.05, Tick()))[:3]
    assert start == ("u", StartSegment(request("a"), [Segment(0, None, "u")], 0, "at-g", batch_id=1, epoch=EPOCH))
    assert isinstance(placed[1], Placed) and isinstance(load[1], ClusterLoad)
    cancel = found.handle(5.1, Received("g", Cancel([Attempt("a", 0)], "enough")))
    assert said(cancel) == [("u", Cancel([Attempt("a", 0)], "enough", EPOCH))]
    assert said(found.handle(5.2, greet(EPOCH, lead=True))) == [("g", hello)], "asked again, it goes on"
    assert found.counters.takeovers == 1
    found.check()


@pytest.mark.parametrize("how", ["greeting", "registration", "report"])
def test_a_manager_that_hears_of_a_higher_epoch_gives_up_all_it_had_and_says_nothing_of_it(how: str) -> None:
    found = leading()
    found.handle(0.2, Received("g", Submit(request("a"))), Tick())
    assert found.live == 1
    news = {
        "greeting": greet(EPOCH + 7),
        "registration": register(EPOCH + 7),
        "report": Received("u", WorkerReport("u", 1, 1, WorkerStats(), [Attempt("a", 0)], epoch=EPOCH + 7)),
    }
    effects = said(found.handle(0.3, news[how]))
    assert ("g", ManagerHello(7, EPOCH + 7, False)) in effects
    assert not [message for _, message in effects if isinstance(message, Cancel | AttemptsLost | StartSegment)]
    assert (found.leads, found.live, found.waiting) == (False, 0, 0)
    found.check()


def test_a_manager_that_was_replaced_rests_unless_a_gateway_is_the_one_to_tell() -> None:
    found = leading()
    found.handle(1.0, register(EPOCH + 7))
    assert said(found.handle(1.5, greet(EPOCH + 7, lead=True))) == [("g", ManagerHello(7, EPOCH + 7, False))]
    found.handle(3.1, greet(EPOCH + 7, lead=True))
    assert found.leads
    told_by_asking = leading()
    told_by_asking.handle(1.0, greet(EPOCH + 7, lead=True))
    assert told_by_asking.leads and told_by_asking.counters.takeovers == 2


@given(heard=st.lists(st.integers(0, 10_000), max_size=5), rank=st.integers(0, MOST_MANAGERS - 1))
def test_an_epoch_is_above_all_that_were_heard_of_and_no_other_manager_has_it(heard: list[int], rank: int) -> None:
    manager = Leadership(3, rank, MOST_MANAGERS)
    for epoch in heard:
        manager.outranked(0.0, epoch)
    assert manager.take(0.0)
    assert manager.epoch > max(heard, default=0) and manager.epoch % MOST_MANAGERS == rank
    assert manager.epoch // MOST_MANAGERS >= 3, "above its predecessor's of an earlier incarnation"


def test_a_manager_without_others_leads_from_its_start_and_never_gives_up() -> None:
    alone = Leadership(3, 0, 1)
    assert (alone.leads, alone.epoch) == (True, 0)
    assert not alone.outranked(0.0, EPOCH) and alone.leads and alone.epoch > EPOCH


def test_lost_attempts_are_told_once_however_often_a_gateway_named_them_meanwhile() -> None:
    """`Outstanding` of before it heard of the loss; one that it still names later is told again."""
    found = leading()
    names = [f"r{index}" for index in range(5)]
    found.handle(0.2, *(Received("g", Submit(request(name))) for name in names), Tick())
    attempts = [Attempt(name, 0) for name in names]
    register_anew = Received("u", RegisterWorker("u", 2, "at-u", CAPACITY, [], epoch=EPOCH))
    lost = [message for _, message in said(found.handle(3.0, register_anew)) if isinstance(message, AttemptsLost)]
    assert [message.attempts for message in lost] == [attempts], "all that was lost with one worker at once"
    named = Received("g", Outstanding(attempts))
    for at_s in (3.01, 3.02, 4.0):
        assert said(found.handle(at_s, named)) == []
    assert found.counters.attempts_lost == 5
    ((_, again),) = said(found.handle(4.6, named))
    assert isinstance(again, AttemptsLost) and again.attempts == attempts


# -- a worker -------------------------------------------------------------------------------------------------------


def worker() -> WorkerMachine:
    setup = msgspec.structs.replace(small_worker.setup(Role.UNIFIED), standbys=(B,))
    kv = PagedAllocator(small_worker.GEOMETRY, small_worker.BLOCKS, 0, prefix_caching=False)
    order = ContinuousBatching(max_rows=16, max_step_tokens=64, prefill_chunk=64, preemption="recompute")
    return WorkerMachine(setup, order, kv, Random(0))


def kinds(effects: list[WorkerEffect]) -> list[tuple[str, str]]:
    return [(peer, type(message).__name__) for peer, message in said(effects)]


def test_a_worker_reports_to_the_leader_and_is_known_to_the_others() -> None:
    one = worker()
    assert kinds(one.handle(0.0, ReportDue(0))) == [(A, "RegisterWorker"), (B, "RegisterWorker")]
    one.handle(0.1, Received(A, Registered(1, 80)), Received(B, Registered(2, 0, False)))
    told = [kinds(one.handle(0.2 * index, ReportDue(0))) for index in range(1, 11)]
    assert [names for names in told if len(names) > 1] == [[(A, "WorkerReport"), (B, "RegisterWorker")]] * 2
    assert sum(names[0] == (A, "WorkerReport") for names in told) == 10


def test_a_worker_refuses_the_commands_of_a_manager_that_was_replaced_and_tells_it() -> None:
    one = worker()
    one.handle(0.0, Received(A, Registered(1, 80)))
    told = [(A, "RegisterWorker"), (B, "RegisterWorker")]
    assert kinds(one.handle(0.1, Received(B, ManagerHello(2, 89)))) == told, "the former one first: it leads no more"
    stale = msgspec.structs.replace(small_worker.whole("old"), epoch=80)
    ((peer, answer),) = said(one.handle(0.2, Received(A, stale)))
    assert (peer, type(answer), one.idle, one.counters.fenced) == (A, RegisterWorker, True, 1)
    assert isinstance(answer, RegisterWorker) and answer.epoch == 89
    one.handle(0.3, Received(B, msgspec.structs.replace(stale, epoch=89)))
    assert not one.idle
    one.handle(0.4, Received(A, Cancel([stale.request.attempt], "no gateway owns it", 80)))
    assert not one.idle, "a cancel of before its replacement ends nothing"
    one.handle(0.5, Received(B, Registered(2, 89)), Received(A, ManagerHello(1, 80)))
    assert kinds(one.handle(0.6, ReportDue(0)))[0] == (B, "WorkerReport")


def test_a_command_of_a_higher_epoch_is_followed_although_no_greeting_came_before() -> None:
    one = worker()
    one.handle(0.0, Received(A, Registered(1, 80)))
    one.handle(0.1, Received(B, msgspec.structs.replace(small_worker.whole(), epoch=89)))
    assert not one.idle
    assert kinds(one.handle(0.2, ReportDue(0))) == [(A, "RegisterWorker"), (B, "RegisterWorker")]


# -- a gateway ------------------------------------------------------------------------------------------------------


def link() -> ManagerLink:
    return ManagerLink(GatewayHello("g", 1, "at-g"), load_interval_s=0.2, managers=(A, B, C))


def asked(one: ManagerLink, now_s: float) -> list[str]:
    return [name for name, hello in one.due_hellos(now_s) if hello.lead]


def test_at_its_start_a_gateway_looks_for_a_leader_before_it_asks_for_one() -> None:
    one = link()
    assert asked(one, 0.0) == []
    one.on_hello(0.01, A, ManagerHello(1, 0, False))
    one.on_hello(0.01, B, ManagerHello(2, 0, False))
    assert asked(one, 0.2) == [], "the third may lead"
    assert one.on_hello(0.3, C, ManagerHello(3, 26))
    assert (one.manager, one.known(0.3), one.epoch) == (C, True, 26)
    one = link()
    assert asked(one, 0.0) == []
    for name in (B, C, A):
        one.on_hello(0.01, name, ManagerHello(1, 0, False))
    assert asked(one, 0.2) == [A], "none does: the first in order"


def test_a_gateway_asks_the_first_standby_that_lives_when_its_leader_is_silent() -> None:
    one = link()
    one.due_hellos(0.0)
    one.on_hello(0.0, A, ManagerHello(1, 8))
    one.note_alive(0.9, A)
    assert [name for name, _ in one.due_hellos(STANDBY_HELLO_INTERVAL_S)] == [B, C], (
        "now and then, to know who is there"
    )
    one.note_alive(1.0, A)
    one.on_hello(1.0, C, ManagerHello(3, 8, False))
    assert one.known(1.5) and not one.known(1.7)
    assert asked(one, 1.7) == [C], "B never spoke"
    assert one.on_hello(1.71, C, ManagerHello(3, 10))
    assert not one.note_alive(1.8, A), "what the old one still says counts no more"
    assert not one.on_hello(1.9, A, ManagerHello(1, 8)) and one.manager == C


def test_a_leader_that_says_that_it_was_replaced_is_not_waited_for() -> None:
    one = link()
    one.due_hellos(0.0)
    one.on_hello(0.0, A, ManagerHello(1, 8))
    assert not one.on_hello(0.3, A, ManagerHello(1, 18, False))
    assert not one.known(0.3)
    greetings = one.due_hellos(0.3)
    assert [(name, hello.lead, hello.epoch) for name, hello in greetings] == [(n, False, 18) for n in (A, B, C)]
    assert one.on_hello(0.31, C, ManagerHello(3, 18)) and one.known(0.31)


# -- all of them together -------------------------------------------------------------------------------------------


def requests(random: Random) -> Iterator[Asked]:
    while True:
        yield Asked(tokens(random, random.randint(1, 40)), random.randint(1, 30))


def offer(world: World, count: int, over_s: float = 3.0) -> None:
    clusters.offer(world, count, requests, over_s=over_s)


def test_a_standby_takes_over_within_a_second_and_running_requests_do_not_notice() -> None:
    world, random = World(7, PD, Disaggregated, blocks=256, managers=2, load_interval_s=0.2), Random(4)
    for index in range(40):
        submit_at(world, 2.0 + 0.07 * index, f"r{index}", Asked(tokens(random, 20), 60))
    world.at(3.55, lambda: world.kill_manager(None))
    finish(world, 6.0)
    assert (world.leader, world.manager.counters.takeovers) == (B, 1)
    waits_s = {name: owned.times_s[0] - owned.submitted_s for name, owned in world.owned.items()}
    assert max(waits_s.values()) < 1.0
    begun = [owned for owned in world.owned.values() if owned.times_s[0] < 3.5 < 3.6 < owned.times_s[-1]]
    assert begun and all(owned.attempt is not None and owned.attempt.number == 0 for owned in begun)


@pytest.mark.parametrize("managers", [2, 3])
def test_each_manager_in_turn(managers: int) -> None:
    """The one that is back stands by, until it is the turn of the one that leads now."""
    world = World(8, PD_TWICE, Disaggregated, managers=managers, load_interval_s=0.2)
    offer(world, 60, over_s=9.0)
    for round_ in range(3):
        world.at(2.0 + 2.5 * round_, lambda: world.kill_manager(0.5, world.leader))
    finish(world, 10.0)
    assert len(world.managers) == managers


def test_a_leader_that_was_stopped_stands_by_when_it_goes_on_and_does_no_harm() -> None:
    world = World(9, PD_TWICE, Disaggregated, managers=2)
    offer(world, 60, over_s=6.0)
    world.at(2.5, lambda: world.inflict(f"freeze {A}", 3.0))
    finish(world, 8.0)
    assert world.leader == B
    assert not world.cluster.nodes[A].machine.leads


def test_a_leader_that_only_its_gateway_cannot_reach_is_fenced_by_the_workers() -> None:
    """It goes on with all it has to do: cancels what nobody seems to own, reports silence; none of it counts."""
    world = World(10, PD_TWICE, Disaggregated, managers=2)
    offer(world, 60, over_s=6.0)
    world.at(2.5, lambda: world.inflict(f"cut {A} {GATEWAY}", 8.0))
    finish(world, 12.0)
    assert world.leader == B and not world.cluster.nodes[A].machine.leads


@pytest.mark.parametrize("seed", by_default(range(4), 0, 1))
def test_two_managers_that_reach_nobody_they_should(seed: int) -> None:
    """Gateway, workers and managers cut from each other in turn, two pairs at a time."""
    world = World(seed, PD, Disaggregated, managers=2, load_interval_s=0.2)
    offer(world, 40, over_s=6.0)
    pairs = list(combinations((A, B, GATEWAY, *PD), 2))
    Random(seed).shuffle(pairs)
    for index, (one, other) in enumerate(pairs):
        world.at(1.5 + 0.4 * index, lambda one=one, other=other: world.network.cut(one, other, world.now_s + 1.0))
    finish(world, 8.0)


@of_worlds(0.5)
@given(
    seed=st.integers(0, 2**32),
    managers=st.sampled_from([2, 3]),
    placement=st.sampled_from([Colocated, Disaggregated, SplitAnywhere]),
    load_interval_s=st.sampled_from([0.2, 0.5]),
    delay=st.sampled_from([0.002, 0.05]),
    loss=st.sampled_from([0.0, 0.05]),
    repeats=st.sampled_from([0.0, 0.1]),
    faults=any_faults(latest_s=5.0, longest_s=6.0, most=6, managers=(A, B)),
)
def test_no_token_is_doubled_or_lost_whatever_breaks(
    seed: int,
    managers: int,
    placement: Callable[[], Placement],
    load_interval_s: float,
    delay: float,
    loss: float,
    repeats: float,
    faults: list[Fault],
) -> None:
    world = World(
        seed,
        PD_TWICE,
        placement,
        message_delay_s=delay,
        loss_rate=loss,
        repeat_rate=repeats,
        stall_timeout_s=20.0,
        managers=managers,
        load_interval_s=load_interval_s,
    )
    offer(world, 30)
    strike(world, faults)
    finish(world, 6.0)
