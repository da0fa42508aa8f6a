"""Batches that the sections compute: decode rows, and a prompt's rows beside them, over the first blocks of a cache.

Called by the sections that execute steps themselves. Contexts are whatever lies in the cache.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import GREEDY, SamplingRow, StepBatch
from cohort.common.engine.step.trial_batch import trial_batch
from cohort.services.bench.gpu_check.frame.guard import DoesNotFit


def rows_of(runner: ModelRunner, rows: int, tokens_per_row: int, context: int) -> StepBatch:
    """A greedy batch. Raises `DoesNotFit` where the cache cannot hold it."""
    batch = trial_batch(rows, tokens_per_row, context, block_size=runner.block_size, num_blocks=len(runner.kv.blocks))
    if batch is None:
        needed = rows * -(-context // runner.block_size)
        raise DoesNotFit(f"{needed} blocks of a cache of {len(runner.kv.blocks)}")
    return batch


def with_tokens(batch: StepBatch, vocabulary: int) -> StepBatch:
    """The batch with different tokens in all rows."""
    tokens = np.arange(3, 3 + batch.num_tokens, dtype=np.int64) * 7919 % vocabulary
    return replace(batch, token_ids=tokens)


def sampled_with(batch: StepBatch, sampling: SamplingRow) -> StepBatch:
    return replace(batch, sampling=tuple(replace(sampling, position=row) for row in range(len(batch.sample_rows))))


def mixed(runner: ModelRunner, rows: int, context: int, prompt: int) -> StepBatch:
    """A prompt of `prompt` tokens, then `rows` decode rows of this context. Raises `DoesNotFit`."""
    size = runner.block_size
    decode = rows_of(runner, rows, 1, context)
    used, needed = decode.block_tables.size, -(-prompt // size)
    if used + needed > len(runner.kv.blocks) or rows + 1 > runner.max_rows:
        raise DoesNotFit(f"{used + needed} blocks of {len(runner.kv.blocks)}, {rows + 1} rows of {runner.max_rows}")
    width = max(needed, decode.block_tables.shape[1])
    tables = np.zeros((rows + 1, width), dtype=np.int32)
    tables[0, :needed] = np.arange(used, used + needed)
    tables[1:, : decode.block_tables.shape[1]] = decode.block_tables
    positions = np.arange(prompt, dtype=np.int64)
    slots = tables[0, positions // size].astype(np.int64) * size + positions % size
    starts = np.concatenate([[0], prompt + np.arange(rows + 1)]).astype(np.int32)
    return replace(
        decode,
        token_ids=np.ones(prompt + rows, dtype=np.int64),
        positions=np.concatenate([positions, decode.positions]),
        query_start=starts,
        context_lens=np.concatenate([[prompt], decode.context_lens]).astype(np.int32),
        block_tables=tables,
        slot_mapping=np.concatenate([slots, decode.slot_mapping]),
        sample_rows=np.arange(rows + 1, dtype=np.int32),
        sampling=(GREEDY,) * (rows + 1),
    )
