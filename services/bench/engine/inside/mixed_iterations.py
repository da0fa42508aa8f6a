"""What an iteration costs that holds a prompt chunk beside decode rows: mixed shapes and their parts, timed in turn.

Used by `cohort bench mixed-iterations`. Overwrites the cache's first blocks, so nothing may be served meanwhile.
"""

from __future__ import annotations

import platform
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import product
from statistics import median

import msgspec
import torch

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.worker.profile_process import Profile
from cohort.common.engine.worker.profiler import StepPoint, StepShape, step_batch
from cohort.services.bench.engine.inside.comparisons import each_s
from cohort.services.bench.output import markdown_table


def shapes(chunks: Iterable[int], decodes: Iterable[int], contexts: Iterable[int]) -> list[StepShape]:
    """Every chunk alone, every number of decode rows at every context alone, and all combinations of both."""
    rows = list(product(decodes, contexts))
    chunks = list(chunks)
    alone = [
        *(StepShape(1, chunk, chunk) for chunk in chunks),
        *(StepShape(count, 1, context) for count, context in rows),
    ]
    return [
        *alone,
        *(
            StepShape(1, chunk, chunk, decodes=count, decode_context=context)
            for chunk, (count, context) in product(chunks, rows)
        ),
    ]


def measure(runner: ModelRunner, wanted: Sequence[StepShape], rounds: int) -> list[StepPoint]:
    """Every shape that the cache can hold, round by round in turn, so that whatever else the machine does hits all
    alike."""
    steps = []
    for shape in wanted:
        batch = step_batch(shape, block_size=runner.block_size, num_blocks=len(runner.kv.blocks))
        if batch is not None and max(shape.context, shape.decode_context) <= runner.geometry.max_positions:
            steps.append((shape, batch))
    with torch.inference_mode():
        seconds = each_s([partial(runner.execute, batch) for _, batch in steps], rounds)
    return [
        StepPoint(shape, median(times), min(times), rounds) for (shape, _), times in zip(steps, seconds, strict=True)
    ]


_HEAD = ["context", "chunk alone, ms", "rows alone, ms", "mixed, ms", "mixed over both apart", "over the longer"]


def table(points: Sequence[StepPoint]) -> str:
    """One line for each mixed shape whose parts were measured, too."""
    alone_s = {
        (p.shape.rows, p.shape.tokens_per_row, p.shape.context): p.median_s for p in points if not p.shape.decodes
    }
    lines = []
    for point in points:
        shape = point.shape
        if not shape.decodes:
            continue
        chunk_s = alone_s.get((shape.rows, shape.tokens_per_row, shape.context))
        rows_s = alone_s.get((shape.decodes, 1, shape.decode_context))
        if chunk_s is None or rows_s is None:
            continue
        mixed_s = point.median_s
        lines.append(
            [
                str(shape.tokens_per_row),
                str(shape.decodes),
                str(shape.decode_context),
                *(f"{1e3 * seconds:.1f}" for seconds in (chunk_s, rows_s, mixed_s)),
                f"{mixed_s / (chunk_s + rows_s):.2f}",
                f"{mixed_s / max(chunk_s, rows_s):.2f}",
            ]
        )
    return markdown_table(["chunk", "rows"], _HEAD, lines)


def profile(runner: ModelRunner, model_name: str, threads: int, points: list[StepPoint]) -> bytes:
    """The points as `cohort profile` writes them."""
    machine = platform.processor() or platform.machine()
    found = Profile(model_name, machine, str(runner.device), str(runner.dtype), threads, points)
    return msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n"
