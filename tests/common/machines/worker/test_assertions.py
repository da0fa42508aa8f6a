"""State that is broken on purpose: the machine that has it says so at the next event that touches it."""

from __future__ import annotations

import pytest

from cohort.common.errors import InvariantViolated
from cohort.common.kv.block_pool import BlockPool
from cohort.common.kv.free_blocks import FreeBlocks
from cohort.common.kv.lease import LeaseTable
from cohort.common.kv.shared_blocks import SharedBlocks, Tenant
from cohort.common.machines.events import AdapterLoaded, Received, RunsSent, Sampled, StepEnded, Tick
from cohort.common.machines.gateway.ledger import Ledger
from cohort.common.machines.manager.leadership import Leadership
from cohort.common.machines.manager.roster import ManagedAttempt, Roster
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import Cancel, KvAccepted, KvGrant, TokenUpdate
from cohort.common.types import Attempt, Request, Role, SamplingParams
from tests.common.machines.small_worker import BLOCK, PROMPT, machine, segment, whole

R = Attempt("r", 1)


def running() -> WorkerMachine:
    """With a decode step in flight."""
    worker = machine(Role.UNIFIED)
    worker.handle(1.0, Received("manager", whole()))
    worker.handle(1.1, StepEnded([Sampled(R, 41)], 0.1))
    return worker


# -- blocks -------------------------------------------------------------------------------------------------------


def test_a_block_that_is_freed_twice() -> None:
    free = FreeBlocks(8)
    blocks = free.take(4)
    free.add(blocks[:2])
    for twice in ([0, 1], [0, 0]):
        with pytest.raises(AssertionError, match="free"):
            free.add(twice)


def test_a_block_that_is_given_out_while_it_is_owned() -> None:
    pool = BlockPool(8)
    owned = pool.allocate(3)
    pool._free.add(owned)
    with pytest.raises(AssertionError, match="block 0 is given out and has 1 owners"):
        pool.allocate(8)


def test_a_block_that_is_lost() -> None:
    pool = BlockPool(8)
    pool._free.take(1)
    with pytest.raises(AssertionError, match=r"5 free \+ 0 cached \+ 2 owned != 8 blocks"):
        pool.allocate(2)


def test_a_side_of_a_block_that_is_given_back_by_a_stranger() -> None:
    table = SharedBlocks(4, BLOCK)
    one, other = (Tenant(Attempt(name, 0), reversed=False, exclusive=False) for name in "ab")
    table.attach(one, 0, 0)
    other.blocks.append(0)
    with pytest.raises(AssertionError, match="block 0 is not"):
        table.detach(other, 0)


def test_a_lease_that_vanishes() -> None:
    leases = LeaseTable(5.0)
    leases.grant(0.0, 7, R, "prefill")
    del leases._leases[7]
    with pytest.raises(AssertionError, match="1 leases granted, 0 ended, 0 expired, 0 are there"):
        leases.expire(1.0)


# -- a worker -----------------------------------------------------------------------------------------------------


def test_tokens_of_another_step_than_the_one_in_flight() -> None:
    for sampled, said in (([], "0 tokens of a step whose rows yield 1"), ([Sampled(R, 1)] * 2, "2 tokens of a step")):
        with pytest.raises(AssertionError, match=said):
            running().handle(1.2, StepEnded(sampled, 0.1))
    idle = machine(Role.UNIFIED)
    with pytest.raises(InvariantViolated, match="no plan is in flight"):
        idle.handle(1.2, StepEnded([], 0.1))


def test_a_token_that_is_told_twice() -> None:
    worker = running()
    with pytest.raises(AssertionError, match="token 13 is told, 12 are computed"):
        worker._tokens.add(1.2, worker.state.held[R], Sampled(R, 41))


def test_a_row_that_does_not_go_on_where_its_sequence_stands() -> None:
    worker = running()
    worker.state.held[R].sequence.computed += 1
    with pytest.raises(AssertionError, match=f"has {PROMPT + 1} positions, its row {PROMPT}"):
        worker.handle(1.2, StepEnded([Sampled(R, 42)], 0.1))


def test_a_sequence_that_starts_where_its_blocks_are() -> None:
    worker = running()
    del worker.state.held[R]
    with pytest.raises(AssertionError, match="starts here and has"):
        worker.handle(1.2, Received("manager", whole()))


def test_a_request_that_ends_twice() -> None:
    worker = running()
    held = worker.state.held[R]
    worker.handle(1.2, Received("manager", Cancel([R])), Received("manager", Cancel([R])))  # a word that came twice
    with pytest.raises(AssertionError, match="ends a second time"):
        worker._end(1.2, held, "again")


def sending() -> tuple[WorkerMachine, int]:
    """A prefill worker with a run in flight to the decode worker, and the number of these."""
    worker = machine(Role.PREFILL)
    worker.handle(1.0, Received("manager", segment(0)))
    outgoing = worker.sender._outgoing[R]
    blocks = list(range(outgoing.positions // BLOCK))
    grant = KvGrant(R, outgoing.transfer_id, 9, 5.0, blocks, 0, {"link": b"there"})
    worker.handle(1.1, Received("decode", grant))
    worker.handle(1.2, StepEnded([Sampled(R, 41)], 0.1))
    return worker, outgoing.in_flight


def test_runs_that_end_more_often_than_they_began() -> None:
    worker, runs = sending()
    assert runs > 0
    with pytest.raises(AssertionError, match="more runs of lease 9 were sent than begun"):
        worker.handle(1.3, RunsSent(9, None, runs + 1))


def test_kv_that_is_freed_while_the_link_reads_it() -> None:
    worker, runs = sending()
    worker.handle(1.3, Received("decode", KvAccepted(R, 9)))
    settling = worker.sender._draining[9]
    assert settling.in_flight == runs
    assert worker.kv.held(R)
    with pytest.raises(AssertionError, match=f"is freed with {runs} runs in flight"):
        worker.sender._free(settling)


def test_a_lease_that_is_another_transfers_is_no_defect_of_ours() -> None:
    worker = machine(Role.PREFILL)
    worker.handle(1.0, *(Received("manager", segment(0, name)) for name in "ab"))
    for name in "ab":
        key = Attempt(name, 1)
        blocks = list(range(PROMPT // BLOCK))
        transfer_id = worker.sender._outgoing[key].transfer_id
        worker.handle(1.1, Received("decode", KvGrant(key, transfer_id, 9, 5.0, blocks, 0, {"link": b"there"})))
    assert [held.sequence.request_id for held in worker.state.aborting] == ["b"], "given back with the step's end"
    worker.check()


def test_an_adapter_that_nobody_asked_for() -> None:
    with pytest.raises(AssertionError, match="adapter greek was never to be loaded"):
        machine(Role.UNIFIED).handle(1.0, AdapterLoaded("greek"))


def test_time_that_goes_back() -> None:
    worker = running()
    with pytest.raises(AssertionError, match=r"it is 0.5 s, and was 1.1 s"):
        worker.handle(0.5, Tick())


# -- a gateway and a manager --------------------------------------------------------------------------------------


def test_an_owned_request_that_ends_twice() -> None:
    book = Ledger(stall_timeout_s=10.0, request_timeout_s=60.0, max_attempts=4)
    entry = book.open(0.0, Request(Attempt("r", 0), "gateway", [5] * 4, 4, SamplingParams(max_tokens=8), 0.0))
    book.close("r", "the client went away")
    for again in (lambda: book._end(entry), lambda: book._lost(entry, 1.0, "gap", "a gap")):
        with pytest.raises(AssertionError, match=r"ends a second time|is over, and lost"):
            again()


def test_tokens_of_a_request_that_counts_as_waiting() -> None:
    book = Ledger(stall_timeout_s=10.0, request_timeout_s=60.0, max_attempts=4)
    entry = book.open(0.0, Request(Attempt("r", 0), "gateway", [5] * 4, 4, SamplingParams(max_tokens=8), 0.0))
    book.submitted(0.0, "r")
    book.tokens(1.0, "decode", TokenUpdate(entry.attempt, 4, [7]))
    entry.queued_tokens = 12.0
    with pytest.raises(AssertionError, match="counts as waiting"):
        book.next_tokens(1.0, "decode", TokenUpdate(entry.attempt, 5, [7]))


def test_an_older_attempt_after_a_newer_one() -> None:
    roster = Roster(1.0)
    roster.add(ManagedAttempt(Attempt("r", 2), "gateway", queued=True))
    with pytest.raises(AssertionError, match="is not later than"):
        roster.add(ManagedAttempt(Attempt("r", 1), "gateway", queued=True))


def test_a_manager_that_leads_with_an_epoch_of_another() -> None:
    lead = Leadership(3, 0, 2)
    lead._rank = 9
    with pytest.raises(AssertionError, match="epoch"):
        lead.take(1.0)
