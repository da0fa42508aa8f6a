"""Messages that come a second time, late: each counts once, whatever state its request has reached meanwhile."""

from __future__ import annotations

from cohort.common.machines.effects import ReceiveRuns, Run, Send, SendRuns, WorkerEffect
from cohort.common.machines.events import Received, RunsReceived, RunsSent, Sampled, StepEnded
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import (
    KvAbort,
    KvAccepted,
    KvChunk,
    KvGrant,
    KvHandoff,
    KvOffer,
    KvRun,
    SegmentEnded,
    StartSegment,
    Submit,
)
from cohort.common.types import Attempt, Outcome, Role
from tests.common.machines.manager.test_manager_machine import from_gateway, placed, request, sends
from tests.common.machines.small_worker import BLOCKS, PROMPT, machine, segment

R = Attempt("r", 1)
LEASE = 77
OFFER = Received("prefill", KvOffer("prefill", R, 9, PROMPT))


def offer_of(effects: list[WorkerEffect]) -> KvOffer:
    (offer,) = [it.message for it in effects if isinstance(it, Send) and isinstance(it.message, KvOffer)]
    return offer


def grants_of(effects: list[WorkerEffect]) -> list[KvGrant]:
    return [it.message for it in effects if isinstance(it, Send) and isinstance(it.message, KvGrant)]


def sending() -> tuple[WorkerMachine, int]:
    """Its prompt is computed, its KV handed over, its runs are in flight; and the transfer's id."""
    worker = machine(Role.PREFILL)
    offer = offer_of(worker.handle(0.0, Received("manager", segment(0))))
    links = {"link": b"there", "other": b"there"}
    worker.handle(0.1, Received("decode", KvGrant(R, offer.transfer_id, LEASE, 5.0, [10, 11, 12], 0, links)))
    effects = worker.handle(0.2, StepEnded([Sampled(R, 41)], 0.2))
    assert isinstance(effects[0], SendRuns)
    return worker, offer.transfer_id


def test_a_submit_that_is_repeated_after_its_request_has_ended() -> None:
    manager = placed("a")
    wanted = request("a")
    manager.handle(0.2, Received("u", SegmentEnded("u", wanted.attempt, Outcome.FINISHED, 8)))
    again = manager.handle(0.3, from_gateway(Submit(wanted)))
    assert (again, sends(again, StartSegment), manager.live) == ([], [], 0)
    assert manager.counters.submitted == 1
    manager.check()


def test_a_first_segment_that_is_repeated_while_its_runs_settle() -> None:
    """The receiver has accepted, the link has not said so yet: its blocks are still being read."""
    worker, _ = sending()
    worker.handle(0.3, Received("decode", KvAccepted(R, LEASE)))
    assert worker.sender.draining == [R]
    assert worker.handle(0.4, Received("manager", segment(0))) == []
    assert worker.kv.free_blocks == BLOCKS - 3
    worker.check()
    assert worker.handle(0.5, RunsSent(LEASE)) == []
    assert worker.idle and worker.kv.free_blocks == BLOCKS


def test_a_first_segment_that_is_repeated_while_it_runs() -> None:
    worker = machine(Role.PREFILL)
    worker.handle(0.0, Received("manager", segment(0)))
    assert worker.handle(0.1, Received("manager", segment(0))) == []
    assert len(list(worker.sequences())) == 1
    worker.check()


def test_an_offer_that_is_repeated_before_its_segment_during_its_transfer_and_after() -> None:
    worker = machine(Role.DECODE)
    assert worker.handle(0.0, OFFER, OFFER) == [], "its segment is not known yet"
    (grant,) = grants_of(worker.handle(0.1, Received("manager", segment(1))))
    assert worker.handle(0.2, OFFER) == [], "granted"
    block = grant.blocks[0]
    chunk = KvChunk(R, grant.lease_id, 0, "link", [KvRun(1, block, 3, 6)])
    handoff = KvHandoff(R, grant.lease_id, 0, [5] * PROMPT + [41], PROMPT, 1, 0, [], 0.25)
    effects = worker.handle(0.3, Received("prefill", chunk), Received("prefill", handoff))
    assert effects == [ReceiveRuns(grant.lease_id, 0, "link", (Run(1, 0, block, 3, 6),), "prefill")]
    assert worker.handle(0.4, RunsReceived(grant.lease_id, 0))[0] == Send("prefill", KvAccepted(R, grant.lease_id))
    assert worker.handle(0.5, OFFER) == [], "it decodes here"
    assert not worker.receiver.offers and not len(worker.leases)
    worker.check()


def test_an_abort_that_asks_for_another_link_and_is_repeated() -> None:
    """The second one is about a round that is under way already: nothing is sent a third time."""
    worker, transfer = sending()
    retry = Received("decode", KvAbort(R, transfer, "transfer failed", "other", 1))
    match worker.handle(0.3, retry):
        case [SendRuns(round=1, link="other"), Send(message=KvHandoff(round=1))]:
            pass
        case effects:
            raise AssertionError(effects)
    assert worker.handle(0.4, retry) == []
    assert worker.counters.transfer_retries == 1


def test_an_abort_that_ends_a_transfer_and_is_repeated_to_its_sender() -> None:
    worker, transfer = sending()
    abort = Received("decode", KvAbort(R, transfer, "no blocks"))
    ended = [it for it in worker.handle(0.3, abort) if isinstance(it, Send) and isinstance(it.message, SegmentEnded)]
    assert len(ended) == 1
    assert worker.handle(0.4, abort) == []
    assert worker.counters.transfer_failures == 1
    worker.handle(0.5, RunsSent(LEASE))
    assert worker.idle and worker.kv.free_blocks == BLOCKS


def test_an_abort_that_is_repeated_to_its_receiver_does_not_end_the_next_transfer() -> None:
    """Its sender gives up, and the request is offered anew under another transfer."""
    worker = machine(Role.DECODE)
    abort = Received("prefill", KvAbort(R, 9, "offer withdrawn"))
    worker.handle(0.0, Received("manager", segment(1)), OFFER)
    assert worker.handle(0.1, abort) != []
    assert worker.idle
    assert worker.handle(0.2, abort) == []
    anew = Received("prefill", KvOffer("prefill", R, 10, PROMPT))
    (grant,) = grants_of(worker.handle(0.3, Received("manager", segment(1)), anew))
    assert worker.handle(0.4, abort) == []
    assert (grant.transfer_id, R in worker.receiver, len(worker.leases)) == (10, True, 1)
    worker.check()
