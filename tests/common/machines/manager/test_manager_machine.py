"""The manager's verb: events in, whole lists of effects out."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import msgspec
import pytest

from cohort.common.errors import InvariantViolated
from cohort.common.machines.effects import ManagerEffect, Send, Wake
from cohort.common.machines.events import PeerLost, Received, Tick, Undelivered
from cohort.common.machines.manager.manager import ManagerMachine, ManagerSettings
from cohort.common.messages import (
    AttemptsLost,
    Cancel,
    ClusterLoad,
    GatewayHello,
    ManagerHello,
    Message,
    Outstanding,
    Placed,
    Refused,
    Registered,
    RegisterWorker,
    SegmentEnded,
    StartSegment,
    Submit,
    WorkerReport,
)
from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.baselines.placements import Colocated
from cohort.common.policies.interface import ClusterView, Dispatch, Impossible, Placement, Refuse, Wait
from cohort.common.policies.interface import Placed as PlacedBy
from cohort.common.types import (
    Attempt,
    InstanceId,
    Outcome,
    Request,
    RequestId,
    Role,
    SamplingParams,
    Segment,
    Slo,
    WorkerCapacity,
    WorkerStats,
)

CAPACITY = WorkerCapacity(Role.UNIFIED, "m", 1000, 1, 1, 1, 1, 16, 100, 0, 64, 512)
HELLO = GatewayHello("g", 1, "at-g", ["u"])


class CountedOrder(Fcfs):
    decisions = 0

    def decide(self, now_s: float, cluster: ClusterView) -> list[Dispatch]:
        self.decisions += 1
        return super().decide(now_s, cluster)


SETTINGS = ManagerSettings(3.0, 2.0, 0.5, 2)


def machine(
    order: Fcfs | None = None, placement: Placement | None = None, settings: ManagerSettings = SETTINGS
) -> ManagerMachine:
    if order is None:
        order = Fcfs(dispatch_ahead_tokens=1000)
    placement = placement or Colocated()
    return ManagerMachine("manager", 7, settings, order, placement, None, 0.0)


def request(name: str, number: int = 1, arrival_s: float = 0.0, waited_s: float = 0.0) -> Request:
    return Request(Attempt(name, number), "g", [1, 2, 3], 3, SamplingParams(max_tokens=5), arrival_s, waited_s=waited_s)


def register(held: list[Attempt] | None = None, incarnation: int = 1, instance: str = "u") -> Received:
    return Received(instance, RegisterWorker(instance, incarnation, "at-u", CAPACITY, held or []))


def report(held: list[Attempt]) -> Received:
    return Received("u", WorkerReport("u", 1, 1, WorkerStats(), held))


def from_gateway(message: Message) -> Received:
    return Received("g", message)


def start(wanted: Request) -> Send:
    return Send("u", StartSegment(wanted, [Segment(0, None, "u")], 0, "at-g", batch_id=1))


def sends(effects: list[ManagerEffect], kind: type[Message] | None = None) -> list[tuple[InstanceId, Message]]:
    return [
        (it.peer, it.message)
        for it in effects
        if isinstance(it, Send) and (kind is None or isinstance(it.message, kind))
    ]


def ready() -> ManagerMachine:
    found = machine()
    found.handle(0.0, from_gateway(HELLO), register(), Tick())
    return found


def placed(name: str = "a") -> ManagerMachine:
    found = ready()
    assert sends(found.handle(0.1, from_gateway(Submit(request(name)))), StartSegment)
    return found


def test_a_first_tick_reports_the_state_and_its_next_wake() -> None:
    found = machine()
    assert found.handle(0.0, from_gateway(HELLO), register(), Tick()) == [
        Send("g", ManagerHello(7)),
        Send("u", Registered(7)),
        Send("g", ClusterLoad(True, ["u"], 0, 0, 0, 0, 1600, 1000, 0.0)),
        Wake(0.5),
    ]
    assert found.handle(0.1, Tick()) == [Wake(0.5)]  # whichever wake brought it about is used up
    assert found.handle(0.2, from_gateway(Outstanding([]))) == []  # this one still holds
    found.check()


def test_a_quiet_manager_sends_its_load_seldom_and_with_work_at_once() -> None:
    found = ready()
    [(_, load)] = sends(found.handle(0.5, Tick(3.0)), ClusterLoad)
    assert isinstance(load, ClusterLoad) and load.quiet_s == 3.0
    assert found.handle(3.9, Tick(3.0)) == [Wake(4.0)]
    found.handle(3.9, from_gateway(Submit(request("a"))))
    [(_, load)] = sends(found.handle(3.9, Tick()), ClusterLoad)
    assert isinstance(load, ClusterLoad) and load.quiet_s == 0.0
    [(_, load)] = sends(found.handle(4.4, Tick(3.0)), ClusterLoad)  # with a request it is not quiet
    assert isinstance(load, ClusterLoad) and load.quiet_s == 0.0


def test_a_manager_that_another_may_replace_is_never_quiet() -> None:
    found = machine(settings=ManagerSettings(3.0, 2.0, 0.5, 2, managers=2))
    found.handle(0.0, from_gateway(msgspec.structs.replace(HELLO, lead=True)), register(), Tick())
    [(_, load)] = sends(found.handle(0.5, Tick(3.0)), ClusterLoad)
    assert isinstance(load, ClusterLoad) and load.quiet_s == 0.0


def test_a_request_is_placed_and_its_end_frees_it() -> None:
    found = ready()
    wanted = request("a")
    assert found.handle(0.1, from_gateway(Submit(wanted))) == [
        start(wanted),
        Send("g", Placed(wanted.attempt, ["u"], 0.0, "colocated on the least loaded instance")),
    ]
    assert found.live == 1
    found.check()
    assert found.handle(0.2, Received("u", SegmentEnded("u", wanted.attempt, Outcome.FINISHED, 8))) == []
    assert found.live == 0
    found.check()


def test_events_that_arrive_together_are_decided_on_once() -> None:
    order = CountedOrder(dispatch_ahead_tokens=1000)
    found = machine(order)
    found.handle(0.0, from_gateway(HELLO), register(), Tick())
    effects = found.handle(0.1, *(from_gateway(Submit(request(name))) for name in ("a", "b")))
    assert [message.request.request_id for _, message in sends(effects, StartSegment)] == ["a", "b"]  # type: ignore[union-attr]
    assert order.decisions == 1


def test_a_manager_that_does_not_know_a_gateway_or_a_worker_asks_for_them() -> None:
    found = machine()
    events = [from_gateway(Submit(request("a"))), from_gateway(Outstanding([])), report([])]
    assert sends(found.handle(0.0, *events)) == [("g", ManagerHello(7)), ("g", ManagerHello(7)), ("u", ManagerHello(7))]


def test_a_new_manager_places_when_the_workers_are_there_that_its_gateway_named() -> None:
    found = machine()
    wanted = request("a", 2)
    assert sends(found.handle(0.0, from_gateway(HELLO), from_gateway(Submit(wanted)), Tick()), StartSegment) == []
    found.handle(0.1, register())
    assert sends(found.handle(0.15, Tick()), StartSegment) == [("u", start(wanted).message)]


def test_a_new_manager_waits_half_a_second_for_a_worker_that_does_not_come() -> None:
    found = machine()
    hello = GatewayHello("g", 1, "at-g", ["u", "gone"])
    effects = found.handle(0.0, from_gateway(hello), register(), from_gateway(Submit(request("a"))), Tick())
    assert sends(effects, StartSegment) == []
    assert effects[-1] == Wake(0.05), "policies look at what waits again"
    assert found.handle(0.48, Tick()) == [Wake(0.5)]
    load = sends(effects, ClusterLoad)[0][1]
    assert isinstance(load, ClusterLoad)
    assert not load.ready
    assert len(sends(found.handle(0.5, Tick()), StartSegment)) == 1


def test_messages_do_not_put_off_a_wake_that_is_due() -> None:
    found = ready()
    for index in range(5):
        assert found.handle(0.5 + 0.0004 * index, from_gateway(Outstanding([]))) == []
    assert found.handle(0.51, Tick())[-1] == Wake(1.01)


def test_a_request_on_no_worker_is_rescheduled_only_after_settling() -> None:
    found = ready()
    named = from_gateway(Outstanding([Attempt("x", 1)]))
    assert found.handle(1.9, named) == []
    assert sends(found.handle(2.0, named)) == [
        ("g", AttemptsLost([Attempt("x", 1)], "unknown to the manager and to all workers", unheld=True))
    ]


def test_what_was_on_a_worker_that_died_with_the_manager_is_lost_when_all_others_have_spoken() -> None:
    """A node takes both along. No worker that lives could still say that it holds the attempt."""
    held, gone = Attempt("x", 1), Attempt("y", 1)
    found = machine()
    hello = GatewayHello("g", 1, "at-g", ["u", "dead"])
    found.handle(0.0, from_gateway(hello), from_gateway(Outstanding([held, gone])))
    assert sends(found.handle(0.1, PeerLost("dead"), Tick()), AttemptsLost) == [], "the other one has not spoken"
    assert sends(found.handle(0.2, register([held])), AttemptsLost) == [
        ("g", AttemptsLost([gone], "unknown to the manager and to all workers", unheld=True))
    ]
    assert found.live == 1
    found.check()


def test_a_standby_that_knew_of_a_death_does_not_wait_for_the_dead_when_it_leads() -> None:
    gone = Attempt("y", 1)
    found = machine(settings=replace(SETTINGS, rank=1, managers=2))
    hello = GatewayHello("g", 1, "at-g", ["u", "dead"])
    found.handle(0.0, from_gateway(hello), register(), register(instance="dead"))
    found.handle(4.9, register(), register(instance="dead"))
    found.handle(5.0, PeerLost("dead"))
    found.handle(5.6, from_gateway(msgspec.structs.replace(hello, lead=True)))
    assert found.leads
    told = found.handle(5.7, from_gateway(Outstanding([gone])), register())
    assert [attempts.attempts for _, attempts in sends(told, AttemptsLost)] == [[gone]]


def test_what_a_gateway_named_before_it_is_settled_what_workers_hold_is_remembered() -> None:
    found = machine()
    gone = Attempt("y", 1)
    found.handle(0.0, from_gateway(GatewayHello("g", 1, "at-g", ["u", "dead"])), register())
    assert sends(found.handle(0.6, from_gateway(Outstanding([gone]))), AttemptsLost) == []
    assert sends(found.handle(0.9, Tick()), AttemptsLost) == []
    assert [peer for peer, _ in sends(found.handle(1.0, Tick()), AttemptsLost)] == ["g"]
    assert sends(found.handle(1.1, from_gateway(Outstanding([gone]))), AttemptsLost) == [], "once"


def test_a_lost_attempt_counts_once_however_long_its_gateway_goes_on_to_name_it() -> None:
    """A gateway that is seconds behind names it in messages of before it heard; or it was never told."""
    found = placed("x")
    lost = Attempt("x", 1)
    told = sends(found.handle(3.0, PeerLost("u")), AttemptsLost)
    assert [message for _, message in told] == [AttemptsLost([lost], "u: cannot be reached")]
    times: list[float] = []
    for tenth in range(1, 200):
        at_s = 3.0 + tenth / 10
        for _, message in sends(found.handle(at_s, from_gateway(Outstanding([lost]))), AttemptsLost):
            assert isinstance(message, AttemptsLost) and message.attempts == [lost] and message.counted
            times.append(round(at_s - 3.0, 3))
    assert times == [1.5, 4.5, 10.5]
    assert found.counters.attempts_lost == 1
    again = found.handle(23.0, from_gateway(Submit(request("x", 2))), register())
    assert len(sends(again, StartSegment)) == 1
    found.check()


def test_the_end_of_an_attempt_is_no_loss_to_a_gateway_that_is_behind_with_its_tokens() -> None:
    """Its workers were done with it long ago; should the last tokens be lost, it hears that none will come."""
    found = placed("x")
    ended = Attempt("x", 1)
    found.handle(1.0, Received("u", SegmentEnded("u", ended, Outcome.FINISHED, 8)))
    named = from_gateway(Outstanding([ended]))
    assert sends(found.handle(5.9, Tick(), named), AttemptsLost) == []
    told = [("g", AttemptsLost([ended], "finished, and waited for since", unheld=True, counted=True))]
    assert sends(found.handle(6.1, Tick(), named), AttemptsLost) == told
    assert sends(found.handle(7.1, Tick(), named), AttemptsLost) == []
    assert sends(found.handle(8.1, Tick(), named), AttemptsLost) == told
    assert found.counters.attempts_lost == 0
    found.check()
    assert found.handle(30.9, from_gateway(Submit(request("x")))) == [], "of a connection that was slow"


def test_attempts_that_are_lost_later_are_news() -> None:
    found = ready()
    first, second = Attempt("x", 1), Attempt("y", 1)
    found.handle(2.0, from_gateway(Outstanding([first])))
    assert sends(found.handle(3.0, from_gateway(Outstanding([first, second])))) == [
        ("g", AttemptsLost([second], "unknown to the manager and to all workers", unheld=True))
    ]
    assert sends(found.handle(3.6, from_gateway(Outstanding([first, second])))) == [
        ("g", AttemptsLost([first], "lost before, and named since", unheld=True, counted=True))
    ]
    assert found.counters.attempts_lost == 2


def test_a_new_manager_takes_over_running_requests() -> None:
    found = machine()
    held = Attempt("x", 1)
    effects = found.handle(0.0, from_gateway(HELLO), register([held]), from_gateway(Outstanding([held])))
    assert sends(effects, AttemptsLost) == []
    assert found.live == 1
    found.check()
    assert found.handle(0.1, from_gateway(Submit(request("x")))) == []  # said again: it is there
    assert found.handle(0.2, from_gateway(Cancel([held], "enough"))) == [Send("u", Cancel([held], "enough"))]
    assert found.live == 0


@pytest.mark.parametrize("said", [Undelivered("u", Registered(7)), PeerLost("u")])
def test_a_worker_that_cannot_be_reached_is_lost(said: Undelivered | PeerLost) -> None:
    found = placed()
    lost = Attempt("a", 1)
    assert found.handle(0.2, said) == [Send("g", AttemptsLost([lost], "u: cannot be reached"))]
    assert (found.workers, found.live) == (0, 0)
    found.check()
    assert found.handle(0.3, said, Undelivered("g", Placed(lost, [], 0.0, "")), PeerLost("g")) == []
    assert found.counters.workers_lost == 1  # said twice; and a gateway will greet again


def test_a_worker_that_was_lost_and_lives_is_asked_to_register_and_loses_what_is_superseded() -> None:
    found = placed()
    found.handle(1.0, PeerLost("u"))
    (asked,) = sends(found.handle(1.1, report([Attempt("a", 1)])), ManagerHello)
    assert asked[0] == "u"
    found.handle(1.2, register([Attempt("a", 1)]))
    effects = found.handle(1.2, from_gateway(Submit(request("a", 2))))
    assert [message.request.attempt for _, message in sends(effects, StartSegment)] == [Attempt("a", 2)]
    for at_s in (2.0, 3.0, 4.0, 5.0):
        effects = found.handle(
            at_s, from_gateway(Outstanding([Attempt("a", 2)])), report([Attempt("a", 1), Attempt("a", 2)]), Tick()
        )
    assert sends(effects, Cancel) == [("u", Cancel([Attempt("a", 1)], "no gateway owns it"))]
    assert (found.workers, found.live) == (1, 1)
    found.check()


def test_lost_requests_are_placed_before_those_that_waited_meanwhile() -> None:
    """b came after a was lost; a is submitted again later than b, and placed before it, as old as it is."""
    found = placed("a")
    found.handle(1.0, Undelivered("u", Registered(7)))
    found.handle(1.0, from_gateway(Submit(request("b", arrival_s=1.0))))
    assert sends(found.handle(1.02, register(incarnation=2), Tick()), StartSegment) == []
    effects = found.handle(1.05, from_gateway(Submit(request("a", 2, waited_s=0.95))))
    started = [message for _, message in sends(effects, StartSegment)]
    assert [(it.request.attempt, it.request.waited_s) for it in started if isinstance(it, StartSegment)] == [
        (Attempt("a", 2), 0.95),
        (Attempt("b", 1), 0.0),
    ]


def test_the_age_of_a_resubmitted_request_counts_until_it_is_placed() -> None:
    found = ready()
    found.handle(0.5, Undelivered("u", Registered(7)))
    found.handle(1.0, from_gateway(Submit(request("a", 2, waited_s=0.75))))
    (started,) = sends(found.handle(2.0, register(incarnation=2), Tick()), StartSegment)
    assert isinstance(started[1], StartSegment)
    assert started[1].request.waited_s == 1.75


def test_a_lost_request_that_does_not_come_back_holds_the_others_up_for_a_moment_only() -> None:
    found = placed("a")
    found.handle(1.0, Undelivered("u", Registered(7)), from_gateway(Submit(request("b"))))
    effects = found.handle(1.0, register(incarnation=2), Tick())
    assert sends(effects, StartSegment) == []
    assert effects[-1] == Wake(1.05), "policies look at what waits again"
    assert found.handle(1.08, Tick()) == [Wake(1.1)]
    assert len(sends(found.handle(1.1, Tick()), StartSegment)) == 1


def test_a_full_queue_refuses() -> None:
    found = machine()
    events = [from_gateway(Submit(request(name))) for name in ("a", "b", "c")]
    assert sends(found.handle(0.0, from_gateway(HELLO), *events), Refused) == [
        ("g", Refused(Attempt("c", 1), 429, "the manager's queue is full", "queue_full"))
    ]


class Scripted(Colocated):
    """Says what it is told to, once it would have placed a request; remembers which are off all instances."""

    def __init__(self, answer: Refuse | Literal["best_effort"]) -> None:
        super().__init__()
        self.answer = answer
        self.over: list[RequestId] = []

    def place(self, *question: Any) -> PlacedBy | Wait | Impossible | Refuse:
        placed = super().place(*question)
        if not isinstance(placed, PlacedBy):
            return placed
        if isinstance(self.answer, Refuse):
            return self.answer
        return replace(placed, best_effort=True, forecast_s=7.5)

    def finished(self, now_s: float, request_id: RequestId) -> None:
        self.over.append(request_id)


SLO = Slo(ttft_s=1.0, tpot_s=0.1, deadline_s=60.0)


def scripted(answer: Refuse | Literal["best_effort"]) -> tuple[ManagerMachine, Scripted]:
    placement = Scripted(answer)
    found = machine(placement=placement)
    found.handle(0.0, from_gateway(HELLO), register(), Tick())
    return found, placement


def test_a_placement_may_refuse_a_request_and_nothing_of_it_is_left() -> None:
    found, placement = scripted(Refuse("infeasible", 3.5, 4.5))
    wanted = msgspec.structs.replace(request("a", 0), slo=SLO)
    said = sends(found.handle(0.1, from_gateway(Submit(wanted))))
    assert said == [("g", Refused(wanted.attempt, 429, "the server is busy", "infeasible", 3.5, 4.5))]
    assert (found.live, found.waiting, placement.over) == (0, 0, ["a"])
    stats = found.stats()
    assert (stats["refused_total"], stats["refused_infeasible_total"], stats["dispatched_total"]) == (1, 1, 0)
    found.check()


def test_a_placement_may_demote_a_request() -> None:
    found, _ = scripted("best_effort")
    wanted = msgspec.structs.replace(request("a", 0), slo=SLO, if_late="best_effort")
    [(_, started), (_, placed)] = sends(found.handle(0.1, from_gateway(Submit(wanted))))
    assert isinstance(started, StartSegment)
    assert (started.request.traffic_class, started.request.slo) == ("be", Slo(deadline_s=60.0))
    assert placed == Placed(wanted.attempt, ["u"], 0.0, "colocated on the least loaded instance", True, 7.5)
    assert found.stats()["demoted_total"] == 1
    found.check()


@pytest.mark.parametrize(
    "changes", [{"attempt": Attempt("a", 1)}, {"tokens": [1, 2, 3, 4]}], ids=["resubmitted", "has output"]
)
def test_what_was_accepted_is_neither_refused_nor_demoted(changes: dict[str, Any]) -> None:
    """Whatever a placement says: a refusal means that it waits, and is placed once the placement does."""
    wanted = msgspec.structs.replace(request("a", 0), slo=SLO, **changes)
    found, placement = scripted(Refuse("infeasible", 3.5))
    assert sends(found.handle(0.1, from_gateway(Submit(wanted)))) == []
    assert (found.waiting, found.stats()["refused_total"]) == (1, 0)
    placement.answer = "best_effort"
    effects = found.handle(0.2, Tick())
    [(_, started)], [(_, told)] = sends(effects, StartSegment), sends(effects, Placed)
    assert isinstance(started, StartSegment) and isinstance(told, Placed)
    assert (started.request.traffic_class, started.request.slo, told.best_effort) == ("rt", SLO, False)
    assert found.stats()["demoted_total"] == 0
    found.check()


def test_a_cancelled_request_leaves_queue_and_worker() -> None:
    found = placed()
    attempt = Attempt("a", 1)
    assert found.handle(0.2, from_gateway(Cancel([attempt], "gone"))) == [Send("u", Cancel([attempt], "gone"))]
    assert (found.live, found.waiting) == (0, 0)
    found.check()


def test_a_message_that_is_not_to_a_manager_is_refused() -> None:
    with pytest.raises(InvariantViolated, match="Registered of u is not for a manager"):
        machine().handle(0.0, Received("u", Registered(1)))


def test_check_sees_books_that_disagree() -> None:
    found = placed()
    found.check()
    del found._roster.workers["u"].live["a"]
    with pytest.raises(InvariantViolated, match="does not know of it"):
        found.check()
