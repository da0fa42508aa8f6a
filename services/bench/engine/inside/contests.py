"""Steps of the real engine beside their floors, all in turn: round by round the forms of the matrix products, a read of
the memory, and the steps of as many tokens.

Used by `cohort bench engine`. Overwrites the cache's first blocks, so nothing may be served meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Literal

import torch

from cohort.common.engine.model_runner import ModelRunner, trial_batch
from cohort.services.bench.engine.inside.floors import Call, Floors
from cohort.services.bench.engine.report import Contest, Form, StepPoint, Timing
from cohort.services.bench.kernels.measuring import READ_BYTES, each_s, memory_reads


def timing(seconds: Sequence[float]) -> Timing:
    return Timing(median(seconds), min(seconds), max(seconds))


def decode_contest(
    runner: ModelRunner,
    floors: Floors | None,
    rows: int,
    contexts: Sequence[int],
    rounds: int,
    read_bytes: int = READ_BYTES,
) -> Contest:
    """`rows` rows of one new token at each context that the model and its cache can hold."""
    return _contest(runner, floors, "decode", rows, 1, contexts, rounds, read_bytes)


def prefill_contest(
    runner: ModelRunner, floors: Floors | None, tokens: int, rounds: int, read_bytes: int = READ_BYTES
) -> Contest:
    """One prompt of `tokens` tokens in one step; only its last token goes through the vocabulary."""
    return _contest(runner, floors, "prefill", 1, tokens, (tokens,), rounds, read_bytes)


def _contest(
    runner: ModelRunner,
    floors: Floors | None,
    kind: Literal["decode", "prefill"],
    rows: int,
    tokens_per_row: int,
    contexts: Sequence[int],
    rounds: int,
    read_bytes: int,
) -> Contest:
    batches = []
    for context in contexts:
        batch = trial_batch(
            rows, tokens_per_row, context, block_size=runner.block_size, num_blocks=len(runner.kv.blocks)
        )
        if batch is not None and context <= runner.geometry.max_positions:
            batches.append((context, batch))
    with torch.inference_mode():
        forms = floors.calls(rows * tokens_per_row, rows) if floors is not None else {}
        calls: list[Call] = [call for pair in forms.values() for call in pair]
        calls += memory_reads(read_bytes)
        steps: list[Call] = [partial(runner.execute, batch) for _, batch in batches]
        seconds = each_s(calls + steps, rounds)
    times: dict[Form, list[float]] = {}
    if floors is not None:
        scale = floors.products.layers / floors.layers
        for index, form in enumerate(forms):
            layers_s, vocabulary_s = seconds[2 * index], seconds[2 * index + 1]
            times[form] = [layer * scale + last for layer, last in zip(layers_s, vocabulary_s, strict=True)]
    reads = 2 * len(forms)
    rates = [read_bytes / min(pair) for pair in zip(seconds[reads], seconds[reads + 1], strict=True)]
    if floors is not None:
        weight_bytes = floors.products.parameters * torch.empty(0, dtype=runner.kv.blocks.dtype).itemsize
        times["memory"] = [weight_bytes / rate for rate in rates]
    points = []
    for (context, _), step_s in zip(batches, seconds[reads + 2 :], strict=True):
        ratios: dict[Form, float] = {
            form: median(step / floor for step, floor in zip(step_s, floor_s, strict=True))
            for form, floor_s in times.items()
        }
        points.append(
            StepPoint(rows=rows, tokens_per_row=tokens_per_row, context=context, step=timing(step_s), ratios=ratios)
        )
    return Contest(
        kind=kind,
        tokens=rows * tokens_per_row,
        sampled=rows,
        rounds=rounds,
        floor_layers=floors.layers if floors is not None else 0,
        bandwidth=median(rates),
        floors={form: timing(floor_s) for form, floor_s in times.items()},
        steps=points,
    )
