"""What people see of a worker's blocks and of decisions agrees with the books, and is bounded."""

from __future__ import annotations

import msgspec
import pytest

from cohort.common.machines.events import Received, Sampled, StepEnded
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_view import blocks_of, iteration_of, rows_of
from cohort.common.messages import StartSegment
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.bros.bidirectional_allocation import BidirectionalAllocator
from cohort.common.policies.ecoserve.nested_allocation import NestedAllocator
from cohort.common.policies.interface import KvAllocator
from cohort.common.process.decision_log import DecisionLog
from cohort.common.types import Role, TrafficClass
from cohort.common.views import BLOCK_STATES, MOST_DECISIONS, MOST_ROWS
from tests.common.machines.small_worker import BLOCKS, GEOMETRY, PROMPT, machine, whole


def asked(name: str, traffic_class: TrafficClass, tokens: int = PROMPT) -> StartSegment:
    start = whole(name)
    request = msgspec.structs.replace(
        start.request, traffic_class=traffic_class, tokens=[sum(name.encode()) % 90] * tokens, prompt_tokens=tokens
    )
    return msgspec.structs.replace(start, request=request)


def run(worker: WorkerMachine, now_s: float) -> None:
    """The step in flight ends; every row that can gives a token."""
    plan = worker.plan_in_flight
    tokens = [
        Sampled(row.sequence.key, 7, None, "") for row in plan.rows if row.start + row.count == row.sequence.known
    ]
    worker.handle(now_s, StepEnded(tokens, 0.01, []))


@pytest.mark.parametrize(
    "kv",
    [
        PagedAllocator(GEOMETRY, BLOCKS, 0, prefix_caching=True),
        NestedAllocator(GEOMETRY, BLOCKS, 0),
        BidirectionalAllocator(GEOMETRY, BLOCKS, 8),
    ],
    ids=lambda kv: type(kv).__name__,
)
def test_every_block_is_on_the_map_once_and_its_owner_is_a_row(kv: KvAllocator) -> None:
    worker = machine(Role.UNIFIED, kv)
    worker.handle(1.0, Received("manager", asked("rt-1", "rt")), Received("manager", asked("be-1", "be", 20)))
    run(worker, 1.1)
    rows = rows_of(worker, 3.0)
    assert [(row.request_id, row.phase, row.age_s) for row in rows] == [
        ("be-1", "decode", 2.0),
        ("rt-1", "decode", 2.0),
    ]
    shown = blocks_of(worker, rows, 4096)
    assert (
        shown.blocks_per_cell == 1 and sum(cells for cells, _, _ in map(msgspec.structs.astuple, shown.runs)) == BLOCKS
    )
    assert sum(shown.counts.values()) == BLOCKS
    assert shown.counts["free"] == kv.free_blocks and shown.counts["cached"] == kv.cached_blocks
    cells = [(BLOCK_STATES[one.state], one.row) for one in shown.runs for _ in range(one.cells)]
    for place, row in enumerate(rows):
        sequence = next(each for each in worker.sequences() if each.request_id == row.request_id)
        owned = [block for block, (_, owner) in enumerate(cells) if owner == place]
        assert owned == sorted(kv.blocks(sequence.key)) or shown.counts["lent"]
        assert {cells[block][0] for block in owned} <= {row.traffic_class, "lent"}
    iteration = iteration_of(worker.state.in_flight)
    assert iteration is not None and (iteration.decode_rows, iteration.prefill_rows) == (2, 0)


def test_a_prefix_that_is_kept_shows_as_cached() -> None:
    kv = PagedAllocator(GEOMETRY, BLOCKS, 0, prefix_caching=True)
    worker = machine(Role.UNIFIED, kv)
    worker.handle(1.0, Received("manager", asked("a", "rt")))
    for step in range(20):
        if worker.state.in_flight is not None:
            run(worker, 1.1 + step)
    assert worker.idle and kv.cached_blocks > 0
    shown = blocks_of(worker, [], 4096)
    assert (shown.counts["cached"], shown.counts["rt"]) == (kv.cached_blocks, 0)
    assert rows_of(worker, 9.0) == [] and iteration_of(worker.state.in_flight) is None


def test_blocks_that_two_sequences_use_show_as_lent() -> None:
    kv = NestedAllocator(GEOMETRY, BLOCKS, 0, prefix_caching=False)
    worker = machine(Role.UNIFIED, kv)
    worker.handle(1.0, Received("manager", asked("lender", "rt")), Received("manager", asked("borrower", "be")))
    lender, borrower = worker.sequences()
    kv.claim(lender, 40)
    assert kv.lend(lender, borrower, 8, PROMPT + 2 * GEOMETRY.block_size)
    shown = blocks_of(worker, rows_of(worker, 2.0), 4096)
    assert shown.counts["lent"] == len(list(kv.lent_blocks())) > 0


def test_a_large_cache_and_a_long_list_make_no_large_view() -> None:
    kv = PagedAllocator(GEOMETRY, 100_000, 0, prefix_caching=False)
    worker = machine(Role.UNIFIED, kv)
    worker.handle(1.0, *[Received("manager", asked(f"r{n}", "be")) for n in range(3 * MOST_ROWS)])
    rows = rows_of(worker, 2.0)
    assert len(rows) == MOST_ROWS
    shown = blocks_of(worker, rows, 1000)
    assert sum(one.cells for one in shown.runs) <= 1000 and shown.blocks_per_cell == 100
    assert sum(shown.counts.values()) == 100_000
    assert len(blocks_of(worker, rows, 10**9).runs) <= 4096


def test_placements_do_not_sweep_refusals_away() -> None:
    log = DecisionLog()
    log.note(0.0, "refused", "r", reason="infeasible", forecast_s=2.5)
    for second in range(1000):
        log.note(float(second), "placed", f"p{second}")
    latest = log.latest(1000.0)
    assert len(latest) <= MOST_DECISIONS
    assert (latest[0].request_id, latest[0].age_s) == ("p999", 1.0)
    assert (latest[-1].kind, latest[-1].reason, latest[-1].age_s) == ("refused", "infeasible", 1000.0)
