"""What a step that ran changes in the sequences of its rows, before its tokens are told; what holds before it begins.

Called by `WorkerMachine` once a step, over all rows: what every decode row runs through is as short as can be. Ends and
drops nothing.
"""

from __future__ import annotations

from cohort.common.machines.worker.worker_state import WorkerState
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Sequence


def assert_plan(plan: IterationPlan, state: WorkerState, following: IterationPlan | None) -> None:
    """Its rows are distinct sequences that are held, and go on where these stand; behind the step in flight
    (`following`) they are among its own."""
    rows, held_of = plan.rows, state.held
    sequences = {row.sequence for row in rows}
    assert len(sequences) == len(rows), f"{len(rows)} rows of {len(sequences)} sequences"
    if following is not None:
        assert len(rows) <= len(following.rows), f"{len(rows)} rows behind {len(following.rows)}"
        return
    tokens, most = 0, state.setup.capacity.max_step_tokens
    blocks, size = state.kv.blocks, state.kv.geometry.block_size
    for row in rows:
        sequence = row.sequence
        tokens += row.count
        assert row.start == sequence.computed and 0 < row.count <= len(sequence.tokens) - row.start, (
            f"{sequence.key} has {sequence.computed} of {sequence.known} positions, its row {row.start} + {row.count}"
        )
        assert row.start + row.count <= len(blocks(sequence.key)) * size, (
            f"{sequence.key} has {len(blocks(sequence.key))} blocks, its row {row.start} + {row.count}"
        )
        assert held_of[sequence.key].sequence is sequence, f"{sequence.key} is in a plan and not held"
    assert tokens <= max(most, len(rows)), f"{tokens} tokens in one step of {most} at most, in {len(rows)} rows"


def note_computed(now_s: float, plan: IterationPlan, state: WorkerState) -> tuple[list[Sequence], int]:
    """The rows' positions are computed. Returns those of their sequences that another worker takes over at some
    position, and how many rows yield a token. Rows of sequences that are over count as wasted."""
    counters, kv, held_of, aborting = state.counters, state.kv, state.held, state.aborting
    size, by_block, decoded, due = kv.geometry.block_size, kv.grows_by_block, 0, 0
    ending: list[Sequence] = []
    for row in plan.rows:
        sequence, count = row.sequence, row.count
        due += row.start + count >= len(sequence.tokens)
        if aborting and held_of[sequence.key].aborting:
            counters.wasted_rows += 1
            continue
        if sequence.end is not None:
            ending.append(sequence)
        assert sequence.computed == row.start, f"{sequence.key} has {sequence.computed} positions, its row {row.start}"
        sequence.computed = computed = row.start + count
        if count == 1 and (sequence.prefill_done_s is not None or sequence.output_tokens > 0):
            decoded += 1
        else:
            counters.prefill_tokens += count
        if sequence.prefill_done_s is None and computed >= len(sequence.request.tokens):
            sequence.prefill_done_s = now_s
        if count > 1 or computed % size == 0 or not by_block:
            kv.committed(sequence)
    counters.decode_tokens += decoded
    return ending, due
