"""Runs of one KV transfer that end together are told in one word, and what a host with foresight need not stop for."""

from __future__ import annotations

from typing import TypeVar

import pytest

from cohort.common.machines.effects import ReceiveRuns, Send, SendRuns, WorkerEffect
from cohort.common.machines.events import Received, RunsReceived, RunsSent, Sampled, StepEnded
from cohort.common.machines.worker.fast_forward import FastForward
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import KvAccepted, KvChunk, KvGrant, KvHandoff, KvOffer, KvRenew, KvRun
from cohort.common.types import Attempt, Role
from tests.common.machines.small_worker import BLOCKS, PROMPT, machine, segment

Told = TypeVar("Told", KvAccepted, KvGrant, KvOffer)


def said(effects: list[WorkerEffect], kind: type[Told]) -> list[Told]:
    return [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, kind)]


def granted() -> tuple[WorkerMachine, KvGrant]:
    """A decode worker that has granted blocks for a prompt of three."""
    worker = machine(Role.DECODE)
    offer = KvOffer("prefill", Attempt("r", 1), 9, PROMPT)
    (grant,) = said(worker.handle(0.0, Received("manager", segment(1)), Received("prefill", offer)), KvGrant)
    return worker, grant


def chunk(grant: KvGrant, blocks: range) -> KvChunk:
    return KvChunk(Attempt("r", 1), grant.lease_id, 0, "link", [KvRun(n, grant.blocks[n], 1, 0) for n in blocks])


def handoff(grant: KvGrant) -> KvHandoff:
    return KvHandoff(Attempt("r", 1), grant.lease_id, 0, [5] * (PROMPT + 1), PROMPT, 3, 0, [], 0.0)


@pytest.mark.parametrize("together", [(1, 1, 1), (1, 2), (3,)])
def test_a_kv_transfer_is_accepted_with_its_last_run_however_they_are_told(together: tuple[int, ...]) -> None:
    worker, grant = granted()
    effects = worker.handle(0.1, Received("prefill", chunk(grant, range(3))), Received("prefill", handoff(grant)))
    assert [len(effect.runs) for effect in effects if isinstance(effect, ReceiveRuns)] == [3]
    for runs in together:
        assert not said(effects, KvAccepted)
        effects = worker.handle(0.2, RunsReceived(grant.lease_id, 0, None, runs))
    assert said(effects, KvAccepted) == [KvAccepted(Attempt("r", 1), grant.lease_id)]
    assert worker.counters.transfers_in == 1
    worker.check()


@pytest.mark.parametrize("together", [(1, 1, 1), (3,)])
def test_a_sender_is_done_when_all_have_left_and_were_accepted(together: tuple[int, ...]) -> None:
    worker = machine(Role.PREFILL)
    (offer,) = said(worker.handle(0.0, Received("manager", segment(0))), KvOffer)
    blocks = [40, 20, 30]  # no neighbours: three runs
    grant = KvGrant(Attempt("r", 1), offer.transfer_id, 77, 5.0, blocks, 0, {"link": b""})
    effects = worker.handle(0.1, Received("decode", grant), StepEnded([Sampled(Attempt("r", 1), 1)], 0.1))
    (sent,) = [effect for effect in effects if isinstance(effect, SendRuns)]
    assert len(sent.runs) == 3
    worker.handle(0.2, Received("decode", KvAccepted(Attempt("r", 1), 77)))
    for runs in together:
        assert worker.kv.free_blocks == BLOCKS - 3  # accepted, but its runs have not left
        worker.handle(0.3, RunsSent(77, None, runs))
    assert worker.kv.free_blocks == BLOCKS
    assert worker.idle


def test_messages_that_leave_a_receivers_iterations_undisturbed() -> None:
    worker, grant = granted()
    ahead = FastForward(worker)
    assert ahead.is_unaffected_by(segment(1, "later"))  # another worker computes first
    assert not ahead.is_unaffected_by(segment(0, "at once"))
    assert not ahead.is_unaffected_by(KvOffer("prefill", Attempt("later", 1), 10, PROMPT))  # takes blocks
    assert ahead.is_unaffected_by(KvRenew([grant.lease_id]))
    assert ahead.is_unaffected_by(chunk(grant, range(2)))
    worker.handle(0.1, Received("prefill", chunk(grant, range(2))))
    assert ahead.is_unaffected_by_runs(grant.lease_id, 2)  # no KV transfer yet
    worker.handle(0.2, Received("prefill", chunk(grant, range(2, 3))))
    assert ahead.is_unaffected_by(handoff(grant))  # runs are still on their way
    worker.handle(0.2, Received("prefill", handoff(grant)))
    assert ahead.is_unaffected_by_runs(grant.lease_id, 2)
    assert not ahead.is_unaffected_by_runs(grant.lease_id, 3)  # then it runs here
    assert not ahead.is_unaffected_by_runs(grant.lease_id + 1, 1)


def test_a_kv_transfer_whose_runs_are_all_there_disturbs() -> None:
    worker, grant = granted()
    worker.handle(0.1, Received("prefill", chunk(grant, range(3))))
    worker.handle(0.2, RunsReceived(grant.lease_id, 0, None, 3))
    assert not FastForward(worker).is_unaffected_by(handoff(grant))


def test_a_segment_whose_offer_waits_already_disturbs() -> None:
    worker = machine(Role.DECODE)
    worker.handle(0.0, Received("prefill", KvOffer("prefill", Attempt("r", 1), 9, PROMPT)))
    assert not FastForward(worker).is_unaffected_by(segment(1))  # it will be given blocks at once
