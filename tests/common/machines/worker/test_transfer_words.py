"""Words of a KV transfer that come twice, too soon, or of another transfer: what a worker does with each."""

from __future__ import annotations

from cohort.common.machines.effects import ReceiveRuns, Run, Send, SendRuns, StartStep
from cohort.common.machines.events import PlanAhead, Received, RunsReceived, RunsSent, Sampled, StepEnded, Tick
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import (
    BindSegment,
    Cancel,
    KvAbort,
    KvAccepted,
    KvChunk,
    KvGrant,
    KvHandoff,
    KvOffer,
    KvRenew,
    KvRun,
    SegmentEnded,
    TokenBatch,
)
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.types import Attempt, Outcome, Role, Segment
from tests.common.machines.small_worker import GEOMETRY, PROMPT, machine, segment, whole

R = Attempt("r", 1)
LEASE = 77


def offering() -> tuple[WorkerMachine, int]:
    """A worker that computes a prompt and has offered it, and the offer's id."""
    worker = machine(Role.PREFILL)
    offers = [
        effect.message
        for effect in worker.handle(0.0, Received("manager", segment(0)))
        if isinstance(effect, Send) and isinstance(effect.message, KvOffer)
    ]
    return worker, offers[0].transfer_id


def grant(transfer_id: int, lease_id: int, first: int = 10) -> Received:
    blocks = [first, first + 1, first + 2]
    return Received("decode", KvGrant(R, transfer_id, lease_id, 5.0, blocks, 0, {"link": b"there"}))


def granted() -> tuple[WorkerMachine, int, int]:
    """A worker that waits for a prompt's KV, the lease, and the first of its three blocks."""
    worker = machine(Role.DECODE)
    effects = worker.handle(0.0, Received("prefill", KvOffer("prefill", R, 9, PROMPT)), Received("manager", segment(1)))
    said = effects[-1]
    assert isinstance(said, Send) and isinstance(said.message, KvGrant)
    return worker, said.message.lease_id, said.message.blocks[0]


def of_runs(effects: list[object]) -> list[tuple[Run, ...]]:
    return [effect.runs for effect in effects if isinstance(effect, SendRuns | ReceiveRuns)]


def test_the_grant_of_another_offer_is_none() -> None:
    """Of an offer to a worker that gave it up: its blocks may be another request's by now."""
    worker, offered = offering()
    assert worker.handle(0.1, grant(offered + 1, LEASE + 1, first=20)) == []
    worker.handle(0.2, grant(offered, LEASE))
    [[run]] = of_runs([*worker.handle(0.3, StepEnded([Sampled(R, 41)], 0.3))])
    assert (run.target, run.num_blocks) == (10, 3)


def test_the_wait_for_the_acceptance_begins_anew_with_every_run_that_arrives() -> None:
    """10 s from the last one: over a slow link the first runs take as long as that."""
    worker, offered = offering()
    worker.handle(0.1, grant(offered, LEASE))
    worker.handle(0.2, StepEnded([Sampled(R, 41)], 0.2))
    worker.handle(8.0, RunsSent(LEASE))
    assert worker.handle(11.0, Tick()) == [Send("decode", KvRenew([LEASE], []))]
    why = "decode did not accept the KV in time"
    failed = Send("manager", SegmentEnded("prefill", R, Outcome.FAILED, PROMPT, why))
    assert failed in worker.handle(18.0, Tick())


def test_a_chunk_of_one_run_that_comes_twice_is_received_once() -> None:
    worker, lease, block = granted()
    chunk = Received("prefill", KvChunk(R, lease, 0, "link", [KvRun(1, block, 3, 6)]))
    assert len(of_runs([*worker.handle(0.1, chunk)])) == 1
    assert worker.handle(0.2, chunk) == []


def test_a_second_round_counts_its_own_runs_alone() -> None:
    """One of two runs arrived in the first."""
    worker, lease, block = granted()

    def round_of_two(number: int, first_tag: int) -> Received:
        runs = [KvRun(first_tag, block, 2, 6), KvRun(first_tag + 1, block + 2, 1, 6)]
        return Received("prefill", KvChunk(R, lease, number, "link", runs))

    worker.handle(0.1, round_of_two(0, 1), RunsReceived(lease, 0))
    again = Send("prefill", KvAbort(R, 9, "transfer failed", "link", 1))
    assert worker.handle(0.2, RunsReceived(lease, 0, "broken")) == [again]
    handoff = Received("prefill", KvHandoff(R, lease, 1, [5] * PROMPT + [41], PROMPT, 2, 0, [], 0.0))
    assert len(of_runs([*worker.handle(0.3, round_of_two(1, 3), handoff)])) == 1
    accepted = Send("prefill", KvAccepted(R, lease))
    assert accepted not in worker.handle(0.4, RunsReceived(lease, 1))
    assert accepted in worker.handle(0.5, RunsReceived(lease, 1))


def test_a_run_that_leaves_the_granted_blocks_ends_the_transfer() -> None:
    worker, lease, block = granted()
    effects = worker.handle(0.1, Received("prefill", KvChunk(R, lease, 0, "link", [KvRun(1, block, 4, 6)])))
    assert of_runs([*effects]) == []
    why = "prefill sent KV to blocks it was not granted"
    assert effects == [
        Send("manager", SegmentEnded("decode", R, Outcome.FAILED, 0, why)),
        Send("prefill", KvAbort(R, 9, why)),
    ]
    assert worker.idle


def test_what_the_former_worker_sampled_is_repeated_once() -> None:
    worker, lease, block = granted()
    chunk = KvChunk(R, lease, 0, "link", [KvRun(1, block, 3, 6)])
    handoff = KvHandoff(R, lease, 0, [5] * PROMPT + [41], PROMPT, 1, 0, [], 0.0)
    worker.handle(0.1, Received("prefill", chunk), Received("prefill", handoff), RunsReceived(lease, 0))
    told = []
    for token in (42, 43):
        for effect in worker.handle(0.2, StepEnded([Sampled(R, token)], 0.1)):
            if isinstance(effect, Send) and isinstance(effect.message, TokenBatch):
                told += [(update.position, update.tokens) for update in effect.message.updates]
    assert told == [(PROMPT, [41, 42]), (PROMPT + 2, [43])]


def test_a_request_that_leaves_a_draining_worker_is_not_computed_there_meanwhile() -> None:
    worker = machine(Role.UNIFIED)
    worker.handle(0.0, Received("manager", whole("r")))
    bound = BindSegment(R, Segment(PROMPT, None, "other"), "ipc://other")
    assert worker.handle(0.1, Received("manager", bound)) == []
    effects = worker.handle(0.2, StepEnded([Sampled(R, 41)], 0.2))
    assert not any(isinstance(effect, StartStep) for effect in effects)
    [offer] = [e.message for e in effects if isinstance(e, Send) and isinstance(e.message, KvOffer)]
    assert offer.positions == PROMPT
    assert not any(isinstance(effect, StartStep) for effect in worker.handle(0.3, Tick()))
    # Nor does the scheduler wait for it: a step with all that it has is followed by one that is planned ahead.
    worker.handle(0.4, Received("manager", whole("n")))
    worker.handle(0.5, StepEnded([Sampled(Attempt("n", 1), 41)], 0.1))
    [ahead] = worker.handle(0.55, PlanAhead([]))
    assert isinstance(ahead, StartStep) and ahead.ahead


def test_an_offer_waits_for_the_next_blocks_of_those_that_run() -> None:
    """Five that run hold 15 of 20 blocks; the five that are left would do for what is offered, and for no token."""
    worker = machine(Role.DECODE, PagedAllocator(GEOMETRY, 20, 0, prefix_caching=False))
    worker.handle(0.0, *(Received("manager", whole(name)) for name in "abcde"))
    offered = Received("prefill", KvOffer("prefill", R, 9, 20))

    def grants(effects: list[object]) -> int:
        return sum(isinstance(effect, Send) and isinstance(effect.message, KvGrant) for effect in effects)

    assert grants([*worker.handle(0.1, Received("manager", segment(1)), offered)]) == 0
    assert grants([*worker.handle(0.2, Received("manager", Cancel([Attempt("a", 1)])))]) == 0
    sampled = [Sampled(Attempt(name, 1), 41) for name in "abcde"]
    assert grants([*worker.handle(0.3, StepEnded(sampled, 0.3))]) == 1
