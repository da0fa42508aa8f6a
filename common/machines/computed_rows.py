"""What a step that ran changes in the sequences of its rows, before its tokens are told.

Called by `WorkerMachine` once a step, over all rows: what every decode row runs through is as short as can be. Ends and
drops nothing.
"""

from __future__ import annotations

from cohort.common.machines.worker_state import WorkerState
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Sequence


def note_computed(now_s: float, plan: IterationPlan, state: WorkerState) -> list[Sequence]:
    """The rows' positions are computed. Returns those of their sequences that another worker takes over at some
    position. Rows of sequences that are over count as wasted."""
    counters, kv, held_of, aborting = state.counters, state.kv, state.held, state.aborting
    size, by_block, decoded = kv.geometry.block_size, kv.grows_by_block, 0
    ending: list[Sequence] = []
    for row in plan.rows:
        sequence, count = row.sequence, row.count
        if aborting and held_of[sequence.key].aborting:
            counters.wasted_rows += 1
            continue
        if sequence.end is not None:
            ending.append(sequence)
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
    return ending
