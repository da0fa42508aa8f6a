"""View of a worker for people: its sequences, the iteration that runs, and who has which KV block.

Called by the live host while a person looks (`Look`). Reads a `WorkerMachine` in one walk over the held blocks; what
leaves is bounded by `common/views.py`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import groupby
from typing import cast

from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import Held, WorkerCounters
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import NO_BLOCK, KvAllocator
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt
from cohort.common.views import (
    BLOCK_STATES,
    MOST_CELLS,
    MOST_ROWS,
    BlockMap,
    BlockState,
    CellRun,
    DraftTally,
    Iteration,
    Row,
    RowPhase,
)

_CODE: dict[BlockState, int] = {state: code for code, state in enumerate(BLOCK_STATES)}
_ORDER: tuple[RowPhase, ...] = ("prefill", "decode", "swapped", "leaving", "parked", "awaiting_kv", "waiting")
_LEAST_CELLS = 64


def rows_of(machine: WorkerMachine, now_s: float) -> list[Row]:
    """Return the sequences, those that compute first, in each phase the oldest first; `MOST_ROWS` at most."""
    plan = machine.state.in_flight
    scheduled = {row.sequence.key: row.count for row in plan.rows} if plan is not None else {}
    ranked = sorted(
        (
            (_ORDER.index(_phase(held.sequence)), held.sequence.arrived_s, key)
            for key, held in machine.state.held.items()
        )
    )[:MOST_ROWS]
    return [_row(machine.state.held[key], scheduled.get(key, 0), machine.kv, now_s) for _, _, key in ranked]


def iteration_of(plan: IterationPlan | None) -> Iteration | None:
    if plan is None or not plan.rows:
        return None
    prompts = [row.count for row in plan.rows if row.count > 1]
    return Iteration(len(plan.rows) - len(prompts), len(prompts), sum(prompts))


def drafts_of(counters: WorkerCounters) -> list[DraftTally]:
    return [
        DraftTally(name, rows, counters.drafted_tokens[name], counters.accepted_tokens[name])
        for name, rows in counters.drafted_rows.items()
        if rows
    ]


def blocks_of(machine: WorkerMachine, rows: Iterable[Row], cells: int) -> BlockMap:
    """Return the map of its KV blocks in at most `cells` cells (64 to `MOST_CELLS`)."""
    kv = machine.kv
    total = kv.total_blocks
    states, owners = _paint(machine, {Attempt(row.request_id, row.attempt): n for n, row in enumerate(rows)})
    counts = {state: states.count(code) for state, code in _CODE.items()}
    per_cell = max(1, -(-total // max(_LEAST_CELLS, min(cells, MOST_CELLS))))
    if per_cell > 1:
        whole = range(0, total, per_cell)
        owners = array("i", (_most(owners[first : first + per_cell]) for first in whole))
        states = bytearray(_most(states[first : first + per_cell]) for first in whole)
    runs = [CellRun(len(list(same)), *key) for key, same in groupby(zip(states, owners, strict=True))]
    return BlockMap(total, kv.geometry.block_size, per_cell, runs, counts, kv.host_blocks, kv.host_free_blocks)


def _paint(machine: WorkerMachine, place: dict[Attempt, int]) -> tuple[bytearray, array[int]]:
    """Return each block's state, and the index of the row that has it (-1: none of them)."""
    kv, held = machine.kv, machine.state.held
    states, owners = bytearray(kv.total_blocks), array("i", [-1]) * kv.total_blocks
    cached, lent, real_time = _CODE["cached"], _CODE["lent"], _CODE["rt"]
    for block in kv.cached_table():
        states[block] = cached
    for key in kv.owners():
        of = held.get(key)
        state = _CODE[of.sequence.request.traffic_class if of is not None else "settling"]
        row = place.get(key, -1)
        for table in kv.tables(key):
            for block in table:
                if block == NO_BLOCK:
                    continue
                if states[block] != real_time:  # a prefix that both classes use shows as the more urgent one
                    states[block] = state
                owners[block] = row
    sharing = kv.sharing
    if sharing is not None:
        for block in sharing.lent_blocks():
            states[block] = lent
    return states, owners


def _most(values: bytearray | array[int]) -> int:
    first = values[0]
    if values.count(first) * 2 > len(values):  # type: ignore[arg-type]
        return first
    return max(set(values), key=values.count)


def _row(held: Held, scheduled: int, kv: KvAllocator, now_s: float) -> Row:
    sequence = held.sequence
    request = sequence.request
    return Row(
        request_id=request.request_id,
        attempt=request.attempt.number,
        traffic_class=request.traffic_class,
        phase=_phase(sequence),
        age_s=round(max(0.0, now_s - sequence.arrived_s), 3),
        context=sequence.computed,
        known=sequence.known,
        prompt_tokens=request.prompt_tokens,
        max_tokens=request.sampling.max_tokens,
        predicted=round(sequence.predicted, 1),
        blocks=kv.held(sequence.key),
        scheduled=scheduled,
        preemptions=sequence.preemptions,
        batch_id=sequence.batch_id,
    )


def _phase(sequence: Sequence) -> RowPhase:
    if sequence.phase is Phase.RUNNING:
        return "prefill" if sequence.computed < len(sequence.request.tokens) else "decode"
    return cast(RowPhase, sequence.phase.value)
