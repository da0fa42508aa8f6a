"""Batches that no request asked for: what an engine warms up with, and what is measured.

Called by the model runner and by tools that time steps. Decides nothing.
"""

from __future__ import annotations

import numpy as np

from cohort.common.engine.step.batch import GREEDY, StepBatch


def trial_batch(
    rows: int, tokens_per_row: int, context: int, *, block_size: int, num_blocks: int, groups: int = 1
) -> StepBatch | None:
    """A greedy batch over the first blocks, for warming up and measuring; None when the cache cannot hold it.
    `groups` of layers."""
    blocks_per_row = -(-context // block_size)
    if groups * rows * blocks_per_row > num_blocks or context < tokens_per_row:
        return None
    every = np.arange(groups * rows * blocks_per_row, dtype=np.int32).reshape(groups, rows, blocks_per_row)
    row_positions = np.arange(context - tokens_per_row, context, dtype=np.int64)
    slots = every[..., row_positions // block_size].astype(np.int64) * block_size + row_positions % block_size
    return StepBatch(
        token_ids=np.ones(rows * tokens_per_row, dtype=np.int64),
        positions=np.tile(row_positions, rows),
        query_start=np.arange(rows + 1, dtype=np.int32) * np.int32(tokens_per_row),
        context_lens=np.full(rows, context, dtype=np.int32),
        block_tables=every[0],
        directions=None,
        slot_mapping=slots[0].reshape(-1),
        sample_rows=np.arange(rows, dtype=np.int32),
        sampling=(GREEDY,) * rows,
        more_tables=every[1:] if groups > 1 else None,
        more_slots=slots[1:].reshape(groups - 1, -1) if groups > 1 else None,
    )
