"""Measures what a step costs at chosen shapes: the points that cost models are fitted to.

Called by the `profile` command and by programs that fit a cost model. Returns plain data; fits nothing, stores nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator, Sequence

import msgspec

from cohort.common.engine.batch import StepBatch
from cohort.common.engine.model_runner import ModelRunner, trial_batch


class StepShape(msgspec.Struct, frozen=True, omit_defaults=True):
    """`rows` rows of `tokens_per_row` new tokens, each with `context` KV positions after the step.

    One token per row is a decode step, one row of many tokens a prefill chunk. Beside them `decodes` rows of one token,
    each with `decode_context` positions: a mixed iteration.
    """

    rows: int
    tokens_per_row: int
    context: int
    decodes: int = 0
    decode_context: int = 0


class StepPoint(msgspec.Struct, frozen=True):
    """A measured step: the median of `repeats` runs, and the fastest, in seconds."""

    shape: StepShape
    median_s: float
    fastest_s: float
    repeats: int


def default_shapes(max_context: int, max_rows: int, max_step_tokens: int) -> Iterator[StepShape]:
    """A grid over prefill chunks and decode rows at short and long contexts, within what the engine may run."""
    contexts = [context for context in (128, 512, 2048, 8192) if context <= max_context]
    for tokens in (16, 64, 256, 512, 1024, 2048):
        if tokens <= min(max_step_tokens, max_context):
            yield StepShape(1, tokens, tokens)
            yield from (StepShape(1, tokens, context) for context in contexts if context >= 2 * tokens)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if rows <= min(max_rows, max_step_tokens):
            yield from (StepShape(rows, 1, context) for context in contexts)


def measure(runner: ModelRunner, shapes: Iterable[StepShape], *, repeats: int = 5) -> list[StepPoint]:
    """Time each shape that fits the cache; overwrites the cache's first blocks, so nothing may be served meanwhile."""
    points = []
    for shape in shapes:
        batch = trial_batch(
            shape.rows,
            shape.tokens_per_row,
            shape.context,
            block_size=runner.block_size,
            num_blocks=len(runner.kv.blocks),
        )
        if batch is not None:
            seconds = _time_steps(runner, batch, repeats)
            points.append(StepPoint(shape, statistics.median(seconds), min(seconds), repeats))
    return points


def _time_steps(runner: ModelRunner, batch: StepBatch, repeats: int) -> Sequence[float]:
    runner.execute(batch)  # its caches and allocations are not the step's cost
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        runner.execute(batch)  # returns tokens, so the device has finished
        seconds.append(time.perf_counter() - started)
    return seconds
