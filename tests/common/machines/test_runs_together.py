"""Runs of one hand-over that end together are told in one word, and what a host with foresight need not stop for."""

from __future__ import annotations

from random import Random
from typing import TypeVar

import pytest

from cohort.common.machines.effects import ReceiveRuns, Send, SendRuns
from cohort.common.machines.worker import Sampled, WorkerMachine, WorkerSettings
from cohort.common.messages import KvAccepted, KvChunk, KvGrant, KvHandOver, KvOffer, KvRenew, KvRun, StartSegment
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.types import Attempt, KvGeometry, Request, Role, SamplingParams, Segment, WorkerCapacity

BLOCK, BLOCKS, PROMPT = 4, 64, 12
Told = TypeVar("Told", KvAccepted, KvGrant, KvOffer)


def machine(role: Role) -> WorkerMachine:
    geometry = KvGeometry(1, 1, 8, 2, BLOCK)
    capacity = WorkerCapacity(role, "m", 128, 1, 1, 8, 2, BLOCK, BLOCKS, 0, 16, 64)
    settings = WorkerSettings(
        links=("link",), offer_timeout_s=5.0, accept_timeout_s=10.0, lease_s=5.0, default_prediction=8.0
    )
    scheduler = ContinuousBatching(max_rows=16, max_step_tokens=64, prefill_chunk=64, preemption="recompute")
    return WorkerMachine(
        role.value,
        "manager",
        capacity,
        settings,
        scheduler,
        PagedAllocator(geometry, BLOCKS, 0, prefix_caching=False),
        Random(0),
        lambda: {"link": b""},
    )


def segment(index: int, request_id: str = "r") -> StartSegment:
    request = Request(Attempt(request_id, 1), "gateway", [5] * PROMPT, PROMPT, SamplingParams(max_tokens=8), 0.0)
    segments = [Segment(0, PROMPT, "prefill"), Segment(PROMPT, None, "decode")]
    return StartSegment(request, segments, index, "", "", 0)


def said(worker: WorkerMachine, kind: type[Told]) -> list[Told]:
    effects = [effect for effect in worker.take_effects() if isinstance(effect, Send)]
    return [effect.message for effect in effects if isinstance(effect.message, kind)]


def granted() -> tuple[WorkerMachine, KvGrant]:
    """A decode worker that has granted blocks for a prompt of three."""
    worker = machine(Role.DECODE)
    worker.on_message(0.0, "manager", segment(1))
    worker.on_message(0.0, "prefill", KvOffer("prefill", Attempt("r", 1), 9, PROMPT))
    (grant,) = said(worker, KvGrant)
    return worker, grant


def chunk(grant: KvGrant, blocks: range) -> KvChunk:
    return KvChunk(Attempt("r", 1), grant.lease_id, 0, "link", [KvRun(n, grant.blocks[n], 1, 0) for n in blocks])


def hand_over(grant: KvGrant) -> KvHandOver:
    return KvHandOver(Attempt("r", 1), grant.lease_id, 0, [5] * (PROMPT + 1), PROMPT, 3, 0, [], 0.0)


@pytest.mark.parametrize("together", [(1, 1, 1), (1, 2), (3,)])
def test_a_hand_over_is_accepted_with_its_last_run_however_they_are_told(together: tuple[int, ...]) -> None:
    worker, grant = granted()
    worker.on_message(0.1, "prefill", chunk(grant, range(3)))
    worker.on_message(0.1, "prefill", hand_over(grant))
    assert [len(effect.runs) for effect in worker.take_effects() if isinstance(effect, ReceiveRuns)] == [3]
    for runs in together:
        assert not said(worker, KvAccepted)
        worker.run_received(0.2, grant.lease_id, 0, None, runs)
    assert said(worker, KvAccepted) == [KvAccepted(Attempt("r", 1), grant.lease_id)]
    assert worker.counters.transfers_in == 1
    worker.check()


@pytest.mark.parametrize("together", [(1, 1, 1), (3,)])
def test_a_sender_is_done_when_all_have_left_and_were_accepted(together: tuple[int, ...]) -> None:
    worker = machine(Role.PREFILL)
    worker.on_message(0.0, "manager", segment(0))
    plan = worker.plan(0.0)
    assert plan is not None
    (offer,) = said(worker, KvOffer)
    blocks = [40, 20, 30]  # nobody's neighbours: three runs
    worker.on_message(0.0, "decode", KvGrant(Attempt("r", 1), offer.transfer_id, 77, 5.0, blocks, 0, {"link": b""}))
    worker.completed(0.1, [Sampled(plan.rows[0].sequence, 1)], 0.1)
    (sent,) = [effect for effect in worker.take_effects() if isinstance(effect, SendRuns)]
    assert len(sent.runs) == 3
    worker.on_message(0.2, "decode", KvAccepted(Attempt("r", 1), 77))
    for runs in together:
        assert worker.kv.free_blocks == BLOCKS - 3  # accepted, but its runs have not left
        worker.run_sent(0.3, 77, None, runs)
    assert worker.kv.free_blocks == BLOCKS
    assert worker.idle


def test_what_the_iterations_of_a_receiver_do_not_depend_on() -> None:
    worker, grant = granted()
    assert worker.undisturbed_by(segment(1, "later"))  # somebody else computes first
    assert not worker.undisturbed_by(segment(0, "at once"))
    assert not worker.undisturbed_by(KvOffer("prefill", Attempt("later", 1), 10, PROMPT))  # takes blocks
    assert worker.undisturbed_by(KvRenew([grant.lease_id]))
    assert worker.undisturbed_by(chunk(grant, range(2)))
    worker.on_message(0.1, "prefill", chunk(grant, range(2)))
    assert worker.undisturbed_by_runs(grant.lease_id, 2)  # no hand-over yet
    worker.on_message(0.2, "prefill", chunk(grant, range(2, 3)))
    assert worker.undisturbed_by(hand_over(grant))  # runs are still on their way
    worker.on_message(0.2, "prefill", hand_over(grant))
    assert worker.undisturbed_by_runs(grant.lease_id, 2)
    assert not worker.undisturbed_by_runs(grant.lease_id, 3)  # then it runs here
    assert not worker.undisturbed_by_runs(grant.lease_id + 1, 1)


def test_a_hand_over_whose_runs_are_all_there_disturbs() -> None:
    worker, grant = granted()
    worker.on_message(0.1, "prefill", chunk(grant, range(3)))
    worker.run_received(0.2, grant.lease_id, 0, None, 3)
    assert not worker.undisturbed_by(hand_over(grant))


def test_a_segment_whose_offer_waits_already_disturbs() -> None:
    worker = machine(Role.DECODE)
    worker.on_message(0.0, "prefill", KvOffer("prefill", Attempt("r", 1), 9, PROMPT))
    assert not worker.undisturbed_by(segment(1))  # it will be given blocks at once
