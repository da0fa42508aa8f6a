"""The worker side of `cohort profile`: load the model as a worker would, time steps, write the points as JSON.

    python -m cohort.common.engine.worker.profile_process --config FILE --threads N --repeats N --model-name NAME \\
        --output FILE

A process of its own because the command line never loads torch. Cost models are fitted to its points.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from cohort.common import paths
from cohort.common.config import load_config
from cohort.common.engine.config.model_shape import model_shape
from cohort.common.engine.config.quantization_config import keeps_codes, mxfp4_codes
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import GREEDY, StepBatch
from cohort.common.engine.worker.worker_process import load_runner
from cohort.common.errors import CohortError

_LONG_TOKENS = 256
"""Tokens beyond which a step's caches and allocations are negligible on a processor: its first run counts."""


class StepShape(msgspec.Struct, frozen=True, omit_defaults=True):
    """Shape of a step: `rows` rows of `tokens_per_row` new tokens, each with `context` KV positions after the step. One
    token per row is a decode step, one row of many tokens a prefill chunk. Beside them `decodes` rows of one token,
    each with `decode_context` positions: a mixed iteration."""

    rows: int
    tokens_per_row: int
    context: int
    decodes: int = 0
    decode_context: int = 0


class StepPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """Measured step: the median of `repeats` runs, and the fastest, in seconds. `scatter`: coefficient of variation of
    the runs (standard deviation over mean), without the slowest of them."""

    shape: StepShape
    median_s: float
    fastest_s: float
    repeats: int
    scatter: float = 0.0


def default_shapes(max_context: int, max_rows: int, max_step_tokens: int) -> Iterator[StepShape]:
    """Yield a grid over prefill chunks, decode rows and both, at short and long contexts, within the limits."""
    contexts = [context for context in (128, 512, 2048, 8192) if context <= max_context]
    for tokens in (16, 64, 256, 512, 1024, 2048):
        if tokens <= min(max_step_tokens, max_context):
            yield StepShape(1, tokens, tokens)
            yield from (StepShape(1, tokens, context) for context in contexts if context >= 2 * tokens)
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        if rows <= min(max_rows, max_step_tokens):
            yield from (StepShape(rows, 1, context) for context in contexts)
    for chunk in (16, 64, 256, 512):
        for decodes in (1, 4, 16):
            if chunk + decodes <= max_step_tokens and 1 + decodes <= max_rows and chunk <= max_context:
                yield from (
                    StepShape(1, chunk, chunk, decodes, context) for context in contexts if 128 <= context < 2048
                )


_STRIDE = 7919
"""Step between the tokens of a batch: a prime, so that they differ."""


def step_batch(shape: StepShape, *, block_size: int, num_blocks: int, vocabulary: int = 2) -> StepBatch | None:
    """Return a greedy batch of this shape, every row over blocks of its own; None if the cache cannot hold it. Its
    tokens are spread over the `vocabulary`: those of a mixture go to different experts, as a served batch's do."""
    counts = [shape.tokens_per_row] * shape.rows + [1] * shape.decodes
    contexts = [shape.context] * shape.rows + [shape.decode_context] * shape.decodes
    held = [-(-context // block_size) for context in contexts]
    if sum(held) > num_blocks or any(map(int.__lt__, contexts, counts)):
        return None
    tables = np.zeros((len(counts), max(held)), dtype=np.int32)
    for row, (first, count) in enumerate(zip(np.cumsum([0, *held[:-1]]), held, strict=True)):
        tables[row, :count] = np.arange(first, first + count)
    positions = [np.arange(context - count, context) for context, count in zip(contexts, counts, strict=True)]
    slots = [
        tables[row, at // block_size].astype(np.int64) * block_size + at % block_size
        for row, at in enumerate(positions)
    ]
    return StepBatch(
        token_ids=1 + np.arange(sum(counts), dtype=np.int64) * _STRIDE % max(1, vocabulary - 1),
        positions=np.concatenate(positions).astype(np.int64),
        query_start=np.cumsum([0, *counts]).astype(np.int32),
        context_lens=np.array(contexts, dtype=np.int32),
        block_tables=tables,
        directions=None,
        slot_mapping=np.concatenate(slots),
        sample_rows=np.arange(len(counts), dtype=np.int32),
        sampling=(GREEDY,) * len(counts),
    )


def measure(
    runner: ModelRunner,
    shapes: Iterable[StepShape],
    *,
    repeats: int = 5,
    budget_s: float = float("inf"),
    clock: Callable[[], float] = time.perf_counter,
) -> list[StepPoint]:
    """Time each shape that fits the cache. Overwrites the cache's first blocks, so nothing may be served meanwhile. All
    shapes run in turn, round by round, so that whatever else the machine does hits all alike. After `budget_s` no
    further round begins; one is always measured, after one that only fills caches (on a processor of short steps)."""
    start_s, steps = clock(), []
    on_processor = runner.device.type == "cpu"
    for shape in shapes:
        batch = step_batch(
            shape, block_size=runner.block_size, num_blocks=len(runner.kv.blocks), vocabulary=runner.geometry.vocab_size
        )
        if batch is not None:
            steps.append((shape, batch))
            if not on_processor or batch.num_tokens <= _LONG_TOKENS:
                runner.execute(batch)  # its caches and allocations are not the step's cost
    seconds: list[list[float]] = [[] for _ in steps]
    for round_ in range(repeats):
        if round_ and clock() - start_s > budget_s:
            break
        for (_, batch), times in zip(steps, seconds, strict=True):
            started_s = clock()
            runner.execute(batch)  # returns tokens, so the device has finished
            times.append(clock() - started_s)
    return [point_of(shape, times) for (shape, _), times in zip(steps, seconds, strict=True)]


def point_of(shape: StepShape, seconds: Sequence[float]) -> StepPoint:
    """Return the statistics of one shape's runs. Raises `statistics.StatisticsError` without any."""
    fastest = sorted(seconds)[: max(1, len(seconds) - 1)]
    scatter = statistics.stdev(fastest) / statistics.fmean(fastest) if len(fastest) > 1 else 0.0
    return StepPoint(shape, statistics.median(seconds), min(seconds), len(seconds), scatter)


class Profile(msgspec.Struct, frozen=True, omit_defaults=True):
    """Measured times and their device. `model` is the name of the shape in configs/models that a fit uses;
    `model_shape` the same as measured, in the fields of such a file; `model_folder` where it was loaded from.
    `memory_bytes`: of the device; `units`: what runs work units of attention at a time, multiprocessors or threads."""

    model: str
    machine: str
    device: str
    dtype: str
    threads: int
    points: list[StepPoint]
    model_folder: str = ""
    model_shape: dict[str, Any] = {}
    memory_bytes: int = 0
    units: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="profile_process")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--max-context", type=int, required=True)
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="S", help="no round begins after so long")
    parser.add_argument("--model-name", required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args(arguments)
    try:
        config = load_config([options.config])
        runner = load_runner(config, options.threads)
        longest = min(options.max_context, runner.geometry.max_positions)
        shapes = default_shapes(longest, config.engine.max_rows, config.engine.max_step_tokens)
        points = measure(runner, shapes, repeats=options.repeats, budget_s=options.budget)
    except CohortError as error:
        sys.stderr.write(f"cohort profile: {error}\n")
        return 2
    memory_bytes, units = _device(runner, options.threads)
    geometry = runner.geometry
    coded = geometry.family == "gpt_oss" and keeps_codes(runner.device.type, runner.dtype, mxfp4_codes())
    profile = Profile(
        options.model_name,
        platform.processor() or platform.machine(),
        str(runner.device),
        str(runner.dtype),
        options.threads,
        points,
        str(Path(config.model.path or paths.default_model_dir()).absolute()),
        model_shape(options.model_name, geometry, runner.dtype, runner.kv_dtype, mxfp4=coded),
        memory_bytes,
        units,
    )
    options.output.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
    return 0


def _device(runner: ModelRunner, threads: int) -> tuple[int, int]:
    if runner.device.type == "cuda":
        found = torch.cuda.get_device_properties(runner.device)
        return int(found.total_memory), int(found.multi_processor_count)
    pages = os.sysconf("SC_PHYS_PAGES") if "SC_PHYS_PAGES" in os.sysconf_names else 0
    return pages * os.sysconf("SC_PAGE_SIZE"), threads or os.cpu_count() or 1


if __name__ == "__main__":
    sys.exit(main())
