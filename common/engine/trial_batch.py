"""Batches that no request asked for: what an engine warms up with, and what is measured.

Called by the model runner and by tools that time steps. Decides nothing.
"""

from __future__ import annotations

import numpy as np

from cohort.common.engine.batch import GREEDY, StepBatch


def trial_batch(rows: int, tokens_per_row: int, context: int, *, block_size: int, num_blocks: int) -> StepBatch | None:
    """A greedy batch over the first blocks, for warming up and measuring; None when the cache cannot hold it."""
    blocks_per_row = -(-context // block_size)
    if rows * blocks_per_row > num_blocks or context < tokens_per_row:
        return None
    tables = np.arange(rows * blocks_per_row, dtype=np.int32).reshape(rows, blocks_per_row)
    row_positions = np.arange(context - tokens_per_row, context, dtype=np.int64)
    slots = tables[:, row_positions // block_size].astype(np.int64) * block_size + row_positions % block_size
    return StepBatch(
        token_ids=np.ones(rows * tokens_per_row, dtype=np.int64),
        positions=np.tile(row_positions, rows),
        query_start=np.arange(rows + 1, dtype=np.int32) * np.int32(tokens_per_row),
        context_lens=np.full(rows, context, dtype=np.int32),
        block_tables=tables,
        directions=None,
        slot_mapping=slots.reshape(-1),
        sample_rows=np.arange(rows, dtype=np.int32),
        sampling=(GREEDY,) * rows,
    )
