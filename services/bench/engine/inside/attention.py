"""Decode attention of one model's heads against the bandwidth of the memory and against what torch offers.

Used by `cohort bench engine`.
"""

from __future__ import annotations

import math
from functools import partial
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.kernels.cpu.panels import huge_zeros
from cohort.kernels.fp8_cache import SCALE_BYTES, decoded, encoded, is_fp8
from cohort.kernels.ops.paged_attention import AttentionMeta, paged_attention
from cohort.services.bench.engine.inside.comparisons import each_s, memory_reads, timing
from cohort.services.bench.engine.report import AttentionPoint

_BLOCK_SIZE = 16
_GATHERED_ROUNDS = 2  # of their own, because it needs so much longer


class _Step:
    """Rows of one new token over shuffled blocks of a cache too large to stay in the processor."""

    def __init__(self, runner: ModelRunner, rows: int, context: int, cache_bytes: int) -> None:
        geometry, dtype, self.fp8 = runner.geometry, runner.numbers, is_fp8(runner.kv.blocks)
        dim, self.kv_heads, blocks = geometry.head_dim, geometry.num_kv_heads, -(-context // _BLOCK_SIZE)
        row_bytes = dim + SCALE_BYTES if self.fp8 else dim * dtype.itemsize
        block_bytes = 2 * self.kv_heads * _BLOCK_SIZE * row_bytes
        self.layers = max(2, cache_bytes // (rows * blocks * block_bytes))
        self.read_bytes = self.layers * (rows * context * block_bytes // _BLOCK_SIZE)
        cache = (rows * blocks, self.layers, 2, self.kv_heads, _BLOCK_SIZE)
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
        self.meta = AttentionMeta(starts, contexts, table, self.directions, _BLOCK_SIZE, 1, 0)
        self.query = torch.randn(rows, geometry.num_heads, dim).to(dtype)
        self.out = torch.empty_like(self.query)

    def paged(self, direction: int) -> None:
        """Our kernel over every layer; direction 1 takes every block as filled right to left."""
        self.directions.fill_(direction)
        scale = self.query.shape[2] ** -0.5
        for layer in range(self.layers):
            paged_attention(self.query, self.kv, layer, self.meta, scale, self.out)

    def gather_then_sdpa(self) -> None:
        """Plain torch's way: copy the rows' blocks together, then one dense attention."""
        (rows, columns), dim = self.meta.block_tables.shape, self.query.shape[2]
        index = self.meta.block_tables.flatten().long()
        for layer in range(self.layers):

            def dense(which: int, layer: int = layer) -> Tensor:
                found = self.kv[:, layer, which].index_select(0, index)
                found = found.view(rows, columns, self.kv_heads, _BLOCK_SIZE, -1)
                if self.fp8:
                    found = decoded(found).to(self.query.dtype)
                return found.transpose(1, 2).reshape(rows, self.kv_heads, -1, dim)

            F.scaled_dot_product_attention(self.query.unsqueeze(2), dense(0), dense(1), enable_gqa=True)


def measure_attention(runner: ModelRunner, rows: int, context: int, rounds: int, cache_bytes: int) -> AttentionPoint:
    """Decode attention of this model's heads over more layers than a processor's cache holds: `cache_bytes`, if not
    more."""
    with torch.inference_mode():
        step = _Step(runner, rows, context, cache_bytes)
        calls = (partial(step.paged, 0), partial(step.paged, 1), *memory_reads(cache_bytes))
        forward_s, reversed_s, *reading_s = each_s(calls, rounds)
        (gathered_s,) = each_s((step.gather_then_sdpa,), _GATHERED_ROUNDS)
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
        gathered_ratio=median(gathered_s) / median(forward_s),
    )
