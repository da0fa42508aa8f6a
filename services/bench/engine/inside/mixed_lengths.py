"""A1 · What rows of different prefix lengths cost in one decode step: batches of given lengths, timed in turn.

Used by `cohort bench mixed-lengths`. Overwrites the cache's first blocks, so nothing may be served meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median

import numpy as np
import torch

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import GREEDY, StepBatch
from cohort.services.bench.engine.inside.comparisons import each_s


@dataclass(frozen=True, slots=True)
class Timed:
    """One batch: how many rows, KV positions they read together, median seconds of its step."""

    name: str
    rows: int
    context: int
    step_s: float


def decode_batch(
    contexts: Sequence[int], *, block_size: int, num_blocks: int, queries: Sequence[int] | None = None
) -> StepBatch | None:
    """Return a greedy step of one row per context, each over blocks of its own; None when the cache cannot hold it.
    `queries`: tokens of each row, prompts first; one of each unless given."""
    rows, counts = len(contexts), np.array(queries or [1] * len(contexts))
    held = [-(-context // block_size) for context in contexts]
    if sum(held) > num_blocks or min(contexts) < 1:
        return None
    tables = np.zeros((rows, max(held)), dtype=np.int32)
    for row, (first, count) in enumerate(zip(np.cumsum([0, *held[:-1]]), held, strict=True)):
        tables[row, :count] = np.arange(first, first + count)
    spans = [np.arange(context - count, context) for context, count in zip(contexts, counts, strict=True)]
    positions, of_row = np.concatenate(spans).astype(np.int64), np.repeat(np.arange(rows), counts)
    blocks = tables[of_row, positions // block_size].astype(np.int64)
    return StepBatch(
        token_ids=np.ones(len(positions), dtype=np.int64),
        positions=positions,
        query_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        block_tables=tables,
        directions=None,
        slot_mapping=blocks * block_size + positions % block_size,
        sample_rows=np.arange(rows, dtype=np.int32),
        sampling=(GREEDY,) * rows,
    )


def measure(runner: ModelRunner, batches: Sequence[tuple[str, Sequence[int]]], rounds: int) -> list[Timed]:
    """Time every batch the cache can hold, round by round in turn, so that other load on the machine hits all alike."""
    steps = []
    for name, contexts in batches:
        batch = decode_batch(contexts, block_size=runner.block_size, num_blocks=len(runner.kv.blocks))
        if batch is not None and max(contexts) <= runner.geometry.max_positions:
            steps.append((name, contexts, batch))
    with torch.inference_mode():
        seconds = each_s([partial(runner.execute, batch) for _, _, batch in steps], rounds)
    return [
        Timed(name, len(contexts), sum(contexts), median(times))
        for (name, contexts, _), times in zip(steps, seconds, strict=True)
    ]


def few_long_among_short(rows: int, short: int, long: int) -> list[tuple[str, list[int]]]:
    """§2.3 · Return a batch of short rows, and the same with one, two and four of them long."""
    return [
        (f"{rows - count} short, {count} long", [short] * (rows - count) + [long] * count)
        for count in (0, 1, 2, 4)
        if count < rows
    ]


def aligned_and_mixed(lengths: Sequence[int]) -> list[tuple[str, list[int]]]:
    """§2.4 · Return as many prompts of each length as there are lengths: batches of one length each, and the batch with
    one of every length that the other order consists of."""
    rows = len(lengths)
    return [*((f"aligned at {length}", [length] * rows) for length in lengths), ("mixed", list(lengths))]


def mixed_over_aligned(found: Sequence[Timed]) -> float:
    """Return a mixed step's time over the aligned ones' mean: both orders serve the same rows in as many steps."""
    (mixed,) = (each.step_s for each in found if each.name == "mixed")
    return mixed / fmean(each.step_s for each in found if each.name.startswith("aligned"))
