"""Decode attention of one model's heads against the bandwidth of the memory and against what torch offers.

Used by `cohort bench engine`; the measuring itself is `bench.kernels.measuring`'s.
"""

from __future__ import annotations

from statistics import median

import torch

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.kernels.fp8_cache import is_fp8
from cohort.services.bench.engine.inside.comparisons import timing
from cohort.services.bench.engine.inside.kernels import Shape, decode_attention
from cohort.services.bench.engine.report import AttentionPoint


def measure_attention(runner: ModelRunner, rows: int, context: int, rounds: int, cache_bytes: int) -> AttentionPoint:
    """Decode attention of this model's heads over more layers than a processor's cache holds."""
    geometry = runner.geometry
    shape = Shape("", geometry.num_heads, geometry.num_kv_heads, geometry.head_dim)
    with torch.inference_mode():
        found = decode_attention(
            shape, runner.numbers, rows, context, rounds, cache_bytes=cache_bytes, fp8=is_fp8(runner.kv.blocks)
        )
    rates = [found.read_bytes / seconds for seconds in found.paged_s]
    bandwidths = [found.cache_bytes / seconds for seconds in found.memory_s]
    return AttentionPoint(
        rows=rows,
        context=context,
        layers=found.layers,
        read_bytes=found.read_bytes,
        paged=timing(found.paged_s),
        rate=median(rates),
        bandwidth=median(bandwidths),
        share=median(rate / bandwidth for rate, bandwidth in zip(rates, bandwidths, strict=True)),
        gathered_ratio=median(found.gathered_s) / median(found.paged_s),
    )
