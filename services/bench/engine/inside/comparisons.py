"""Steps of the real engine beside their lower bounds, all in turn: round by round the forms of the matrix products, a
read of the memory, and the steps of as many tokens; decode attention of one model's heads beside the memory likewise.

Used by `cohort bench engine`. Overwrites the cache's first blocks, so nothing may be served meanwhile.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.trial_batch import trial_batch
from cohort.kernels.cpu.panels import huge_zeros
from cohort.kernels.fp8_cache import SCALE_BYTES, encoded, is_fp8
from cohort.kernels.ops.paged_attention import AttentionMeta, paged_attention
from cohort.services.bench.engine.inside.lower_bounds import Call, LowerBounds
from cohort.services.bench.engine.report import AttentionPoint, Comparison, Form, StepPoint, Timing

_ATTENTION_BLOCK = 16
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


def compared(
    runner: ModelRunner,
    lower_bounds: LowerBounds | None,
    rows: int,
    contexts: Sequence[int],
    rounds: int,
    read_bytes: int = READ_BYTES,
    *,
    tokens_per_row: int = 1,
) -> Comparison:
    """`rows` rows of one new token at each context that the model and its cache can hold; with more, prompts in one
    step, of which only the last token goes through the vocabulary."""
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
        kind="decode" if tokens_per_row == 1 else "prefill",
        tokens=rows * tokens_per_row,
        sampled=rows,
        rounds=rounds,
        lower_bound_layers=lower_bounds.layers if lower_bounds is not None else 0,
        bandwidth=median(rates),
        lower_bounds={form: timing(lower_bound_s) for form, lower_bound_s in times.items()},
        steps=points,
    )


class _Step:
    """Rows of one new token over shuffled blocks of a cache too large to stay in the processor."""

    def __init__(self, runner: ModelRunner, rows: int, context: int, cache_bytes: int) -> None:
        geometry, dtype, self.fp8 = runner.geometry, runner.numbers, is_fp8(runner.kv.blocks)
        dim, self.kv_heads, blocks = geometry.head_dim, geometry.num_kv_heads, -(-context // _ATTENTION_BLOCK)
        row_bytes = dim + SCALE_BYTES if self.fp8 else dim * dtype.itemsize
        block_bytes = 2 * self.kv_heads * _ATTENTION_BLOCK * row_bytes
        self.layers = max(2, cache_bytes // (rows * blocks * block_bytes))
        self.read_bytes = self.layers * (rows * context * block_bytes // _ATTENTION_BLOCK)
        cache = (rows * blocks, self.layers, 2, self.kv_heads, _ATTENTION_BLOCK)
        kept = torch.uint8 if self.fp8 else dtype
        # as the engine's cache lies in memory
        self.kv = huge_zeros(math.prod(cache) * row_bytes).view(kept).view(*cache, -1)
        for part in self.kv.unbind():
            numbers = torch.randn(*part.shape[:-1], dim)
            part.copy_(encoded(numbers) if self.fp8 else numbers)
        table = torch.randperm(rows * blocks).to(torch.int32).view(rows, blocks)
        contexts = torch.full((rows,), context, dtype=torch.int32)
        starts = torch.arange(rows + 1, dtype=torch.int32)
        self.directions = torch.zeros_like(table, dtype=torch.uint8)
        self.meta = AttentionMeta(starts, contexts, table, self.directions, _ATTENTION_BLOCK, 1, 0)
        self.query = torch.randn(rows, geometry.num_heads, dim).to(dtype)
        self.out = torch.empty_like(self.query)

    def paged(self, direction: int) -> None:
        """Our kernel over every layer; direction 1 takes every block as filled right to left."""
        self.directions.fill_(direction)
        scale = self.query.shape[2] ** -0.5
        for layer in range(self.layers):
            paged_attention(self.query, self.kv, layer, self.meta, scale, self.out)


def measure_attention(runner: ModelRunner, rows: int, context: int, rounds: int, cache_bytes: int) -> AttentionPoint:
    """Decode attention of this model's heads over more layers than a processor's cache holds: `cache_bytes`, if not
    more."""
    with torch.inference_mode():
        step = _Step(runner, rows, context, cache_bytes)
        calls = (partial(step.paged, 0), partial(step.paged, 1), *memory_reads(cache_bytes))
        forward_s, reversed_s, *reading_s = each_s(calls, rounds)
    rates = [step.read_bytes / seconds for seconds in forward_s]
    bandwidths = [cache_bytes / min(pair) for pair in zip(*reading_s, strict=True)]
    return AttentionPoint(
        rows=rows,
        context=context,
        layers=step.layers,
        read_bytes=step.read_bytes,
        paged=timing(forward_s),
        rate=median(rates),
        bandwidth=median(bandwidths),
        share=median(rate / bandwidth for rate, bandwidth in zip(rates, bandwidths, strict=True)),
        reversed_ratio=median(back / forward for back, forward in zip(reversed_s, forward_s, strict=True)),
    )
