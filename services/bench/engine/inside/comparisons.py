"""Steps of the real engine beside their lower bounds, all in turn: round by round the forms of the matrix products, a
read of the memory, and the steps of as many tokens.

Used by `cohort bench engine`. Overwrites the cache's first blocks, so nothing may be served meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Literal

import torch

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.trial_batch import trial_batch
from cohort.kernels.cpu.panels import huge_zeros
from cohort.services.bench.engine.inside.lower_bounds import Call, LowerBounds
from cohort.services.bench.engine.report import Comparison, Form, StepPoint, Timing

READ_BYTES = 192 << 20  # far beyond any last-level cache: every layer's KV comes from memory


def each_s(calls: Sequence[Callable[[], object]], rounds: int) -> list[list[float]]:
    """Each call's times over rounds in which all run in turn: other load on the machine then hits all alike."""
    seconds: list[list[float]] = [[] for _ in calls]
    for round_index in range(rounds + 1):
        for call, times in zip(calls, seconds, strict=True):
            begin_s = time.perf_counter()
            call()
            if round_index > 0:  # the first round warms up
                times.append(time.perf_counter() - begin_s)
    return seconds


def memory_reads(size: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """Two reads of the same `size` bytes of memory; the faster one tells the bandwidth."""
    memory = huge_zeros(size).view(torch.float32).fill_(1.0)
    return memory.sum, memory.amax


def timing(seconds: Sequence[float]) -> Timing:
    return Timing(median(seconds), min(seconds), max(seconds))


def decode_comparison(
    runner: ModelRunner,
    lower_bounds: LowerBounds | None,
    rows: int,
    contexts: Sequence[int],
    rounds: int,
    read_bytes: int = READ_BYTES,
) -> Comparison:
    """`rows` rows of one new token at each context that the model and its cache can hold."""
    return _comparison(runner, lower_bounds, "decode", rows, 1, contexts, rounds, read_bytes)


def prefill_comparison(
    runner: ModelRunner, lower_bounds: LowerBounds | None, tokens: int, rounds: int, read_bytes: int = READ_BYTES
) -> Comparison:
    """One prompt of `tokens` tokens in one step; only its last token goes through the vocabulary."""
    return _comparison(runner, lower_bounds, "prefill", 1, tokens, (tokens,), rounds, read_bytes)


def _comparison(
    runner: ModelRunner,
    lower_bounds: LowerBounds | None,
    kind: Literal["decode", "prefill"],
    rows: int,
    tokens_per_row: int,
    contexts: Sequence[int],
    rounds: int,
    read_bytes: int,
) -> Comparison:
    batches = []
    for context in contexts:
        batch = trial_batch(
            rows, tokens_per_row, context, block_size=runner.block_size, num_blocks=len(runner.kv.blocks)
        )
        if batch is not None and context <= runner.geometry.max_positions:
            batches.append((context, batch))
    with torch.inference_mode():
        forms = lower_bounds.calls(rows * tokens_per_row, rows) if lower_bounds is not None else {}
        calls: list[Call] = [call for pair in forms.values() for call in pair]
        calls += memory_reads(read_bytes)
        steps: list[Call] = [partial(runner.execute, batch) for _, batch in batches]
        seconds = each_s(calls + steps, rounds)
    times: dict[Form, list[float]] = {}
    if lower_bounds is not None:
        scale = lower_bounds.products.layers / lower_bounds.layers
        for index, form in enumerate(forms):
            layers_s, vocabulary_s = seconds[2 * index], seconds[2 * index + 1]
            times[form] = [layer * scale + last for layer, last in zip(layers_s, vocabulary_s, strict=True)]
    reads = 2 * len(forms)
    rates = [read_bytes / min(pair) for pair in zip(seconds[reads], seconds[reads + 1], strict=True)]
    if lower_bounds is not None:
        weight_bytes = lower_bounds.products.parameters * runner.numbers.itemsize
        times["memory"] = [weight_bytes / rate for rate in rates]
    points = []
    for (context, _), step_s in zip(batches, seconds[reads + 2 :], strict=True):
        ratios: dict[Form, float] = {
            form: median(step / lower_bound for step, lower_bound in zip(step_s, lower_bound_s, strict=True))
            for form, lower_bound_s in times.items()
        }
        points.append(
            StepPoint(rows=rows, tokens_per_row=tokens_per_row, context=context, step=timing(step_s), ratios=ratios)
        )
    return Comparison(
        kind=kind,
        tokens=rows * tokens_per_row,
        sampled=rows,
        rounds=rounds,
        lower_bound_layers=lower_bounds.layers if lower_bounds is not None else 0,
        bandwidth=median(rates),
        lower_bounds={form: timing(lower_bound_s) for form, lower_bound_s in times.items()},
        steps=points,
    )
