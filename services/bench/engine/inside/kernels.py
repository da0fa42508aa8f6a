"""How fast the kernels are on this machine: `cohort bench kernels`, and parts of it for `cohort bench engine`.

Prints decode attention against the measured read bandwidth of the memory and against gather + torch's
scaled_dot_product_attention, blocks filled right to left against left to right, prefill against the same, and the
elementwise steps. Runs for people; serving never calls it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.common.engine.device import compiled_kernels
from cohort.kernels import reference
from cohort.kernels.cpu import native
from cohort.kernels.cpu.panels import huge_zeros
from cohort.kernels.fp8_cache import SCALE_BYTES, decoded, encoded
from cohort.kernels.ops import fused
from cohort.kernels.ops.paged_attention import AttentionMeta, paged_attention, write_kv

BLOCK_SIZE = 16
READ_BYTES = 192 << 20  # far beyond any last-level cache: every layer's KV comes from memory


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads of a model's attention."""

    name: str
    query_heads: int
    kv_heads: int
    head_dim: int


SHAPES = (Shape("SmolLM2-135M", 9, 3, 64), Shape("Llama-3-8B", 32, 8, 128))


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


def best_each_s(calls: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Each call's fastest time in `each_s`."""
    return [min(times) for times in each_s(calls, rounds)]


def memory_reads(size: int = READ_BYTES) -> tuple[Callable[[], object], Callable[[], object]]:
    """Two reads of the same `size` bytes of memory; the faster one tells the bandwidth."""
    memory = huge_zeros(size).view(torch.float32).fill_(1.0)
    return memory.sum, memory.amax


class Step:
    """Rows over shuffled blocks of a cache too large to stay in the processor."""

    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        context_lens: list[int],
        query_lens: list[int],
        cache_bytes: int = READ_BYTES,
        *,
        fp8: bool = False,
    ) -> None:
        """`fp8`: keys and values are kept so."""
        self.shape, self.fp8 = shape, fp8
        blocks = [-(-context // BLOCK_SIZE) for context in context_lens]
        row_bytes = shape.head_dim + SCALE_BYTES if fp8 else shape.head_dim * dtype.itemsize
        block_bytes = 2 * shape.kv_heads * BLOCK_SIZE * row_bytes
        self.layers = max(2, cache_bytes // (sum(blocks) * block_bytes))
        self.read_bytes = sum(context_lens) * block_bytes // BLOCK_SIZE
        cache = (sum(blocks), self.layers, 2, shape.kv_heads, BLOCK_SIZE)
        kept = torch.uint8 if fp8 else dtype
        # as the engine's cache lies in memory
        self.kv = huge_zeros(math.prod(cache) * row_bytes).view(kept).view(*cache, -1)
        for part in self.kv.unbind():
            numbers = torch.randn(*part.shape[:-1], shape.head_dim)
            part.copy_(encoded(numbers) if fp8 else numbers)
        order = torch.randperm(sum(blocks)).to(torch.int32)
        table = torch.zeros(len(blocks), max(blocks), dtype=torch.int32)
        for row, part in enumerate(torch.split(order, blocks)):
            table[row, : len(part)] = part
        starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
        self.meta = AttentionMeta(
            starts,
            torch.tensor(context_lens, dtype=torch.int32),
            table,
            torch.zeros_like(table, dtype=torch.uint8),
            BLOCK_SIZE,
            max(query_lens),
            sum(length > 1 for length in query_lens),
        )
        self.query = torch.randn(sum(query_lens), shape.query_heads, shape.head_dim).to(dtype)
        self.out = torch.empty_like(self.query)
        self.scale = shape.head_dim**-0.5

    def paged(self, direction: int = 0) -> None:
        """Our kernel over every layer; direction 1 takes every block as filled right to left."""
        assert self.meta.directions is not None
        self.meta.directions.fill_(direction)
        for layer in range(self.layers):
            paged_attention(self.query, self.kv, layer, self.meta, self.scale, self.out)

    def gather_then_sdpa(self) -> None:
        """Plain torch's way: copy the rows' blocks together, then one dense attention. Equal rows only."""
        rows, columns = self.meta.block_tables.shape
        heads, dim = self.shape.kv_heads, self.shape.head_dim
        queries = self.meta.max_query_len
        query = self.query.view(rows, queries, -1, dim).transpose(1, 2)
        index = self.meta.block_tables.flatten().long()
        for layer in range(self.layers):

            def dense(which: int, layer: int = layer) -> Tensor:
                found = self.kv[:, layer, which].index_select(0, index).view(rows, columns, heads, BLOCK_SIZE, -1)
                if self.fp8:
                    found = decoded(found).to(query.dtype)
                return found.transpose(1, 2).reshape(rows, heads, -1, dim)

            F.scaled_dot_product_attention(query, dense(0), dense(1), is_causal=queries > 1, enable_gqa=True)


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Times of decode attention over `layers` layers, one per round, and what stands beside it in the same rounds.

    `read_bytes` are the keys and values of all layers; `memory_s` is a plain read of `cache_bytes`. `gathered_s` is
    gather + scaled_dot_product_attention, in rounds of its own, because it needs so much longer.
    """

    layers: int
    read_bytes: int
    cache_bytes: int
    paged_s: list[float]
    reversed_s: list[float]
    memory_s: list[float]
    gathered_s: list[float]


def decode_attention(
    shape: Shape,
    dtype: torch.dtype,
    rows: int,
    context: int,
    rounds: int,
    *,
    gathered_rounds: int = 2,
    cache_bytes: int = READ_BYTES,
    fp8: bool = False,
) -> DecodeAttention:
    """`rows` rows of one new token, each with `context` positions in a cache of `cache_bytes`, if not one of more;
    `fp8`: which is kept so."""
    step = Step(shape, dtype, [context] * rows, [1] * rows, cache_bytes, fp8=fp8)
    calls = (partial(step.paged, 0), partial(step.paged, 1), *memory_reads(cache_bytes))
    forward_s, reversed_s, *reading_s = each_s(calls, rounds)
    (gathered_s,) = each_s((step.gather_then_sdpa,), gathered_rounds)
    memory_s = [min(pair) for pair in zip(*reading_s, strict=True)]
    return DecodeAttention(
        step.layers, step.read_bytes * step.layers, cache_bytes, forward_s, reversed_s, memory_s, gathered_s
    )


def bench_attention(shape: Shape, dtype: torch.dtype, rounds: int) -> None:
    """Decode and prefill of one model's heads."""
    label = f"{shape.name:>12} {str(dtype).removeprefix('torch.'):>8}"
    for rows, context in ((16, 512), (1, 4096)):
        found = decode_attention(shape, dtype, rows, context, rounds)
        forward_s, reversed_s, dense_s = min(found.paged_s), min(found.reversed_s), min(found.gathered_s)
        rate = found.read_bytes / forward_s
        bandwidth = found.cache_bytes / min(found.memory_s)
        print(
            f"{label}  decode {rows:2} x {context:4}: {forward_s / found.layers * 1e6:7.0f} us/layer, "
            f"{rate / 1e9:5.1f} GB/s = {100 * rate / bandwidth:3.0f} % of {bandwidth / 1e9:.1f}; "
            f"gather+sdpa {dense_s / forward_s:4.1f}x as long; reversed {100 * (reversed_s / forward_s - 1):+.1f} %"
        )
    for tokens in (128, 512):
        step = Step(shape, dtype, [tokens], [tokens])
        step.layers = min(step.layers, 4)
        ours_s, dense_s = best_each_s((step.paged, step.gather_then_sdpa), rounds)
        flops = 2 * 2 * shape.query_heads * shape.head_dim * tokens * (tokens + 1) / 2
        print(
            f"{label}  prefill {tokens:8}: {ours_s / step.layers * 1e6:7.0f} us/layer, "
            f"{flops * step.layers / ours_s / 1e9:5.0f} GFLOP/s; gather+sdpa {dense_s / ours_s:4.1f}x as long"
        )


def bench_elementwise(rows: int, dtype: torch.dtype) -> None:
    """The steps between the matrix products, against the torch reference."""
    hidden, intermediate, heads, kv_heads, dim = 576, 1536, 9, 3, 64
    x = torch.randn(rows, hidden).to(dtype)
    weight, out = torch.randn(hidden).to(dtype), torch.empty(rows, hidden, dtype=dtype)
    gate_up, act = torch.randn(rows, 2 * intermediate).to(dtype), torch.empty(rows, intermediate, dtype=dtype)
    qkv = torch.randn(rows, heads + 2 * kv_heads, dim).to(dtype)
    q, k, v = torch.split(qkv, [heads, kv_heads, kv_heads], dim=1)
    cos, sin, positions = torch.rand(2048, dim // 2), torch.rand(2048, dim // 2), torch.arange(rows)
    kv = torch.randn(rows // BLOCK_SIZE + 1, 2, 2, kv_heads, BLOCK_SIZE, dim).to(dtype)
    cases: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "rms_norm": (lambda: fused.rms_norm(x, weight, 1e-5, out), lambda: reference.rms_norm(x, weight, 1e-5, out)),
        "rope": (
            lambda: fused.rope_inplace(q, k, cos, sin, positions),
            lambda: reference.rope_inplace(q, k, cos, sin, positions),
        ),
        "silu_mul": (lambda: fused.silu_mul(gate_up, act), lambda: reference.silu_mul(gate_up, act)),
        "write_kv": (lambda: write_kv(k, v, kv, 1, positions), lambda: reference.write_kv(k, v, kv, 1, positions)),
    }
    for name, (ours, theirs) in cases.items():
        ours_s, theirs_s = best_each_s((ours, theirs), 30)
        print(
            f"{name:>14} {rows:4} rows {str(dtype).removeprefix('torch.'):>8}: {ours_s * 1e6:6.1f} us, "
            f"torch {theirs_s * 1e6:6.1f} us"
        )


def print_all(threads: int, rounds: int, *, elementwise: bool) -> None:
    """A line for every case; `threads` 0 is torch's own choice. Raises `ConfigError`."""
    compiled_kernels.keep_in_cache()
    torch.set_num_threads(threads or torch.get_num_threads())
    torch.manual_seed(0)
    print(f"{native.implementation()} kernels, {torch.get_num_threads()} threads; the fastest of {rounds} rounds")
    with torch.inference_mode():
        for shape in SHAPES:
            for dtype in (torch.bfloat16, torch.float32):
                bench_attention(shape, dtype, rounds)
        for rows in (1, 16, 512) if elementwise else ():
            for dtype in (torch.bfloat16, torch.float32):
                bench_elementwise(rows, dtype)
