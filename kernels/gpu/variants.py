"""Every variant of every kernel that serving one model can meet, compiled before the first request.

Triton compiles at the first launch of a variant, and every row of a worker would wait for it. So the variants are few
and known: numbers that differ from step to step are never specialised on (`do_not_specialize` in the kernels), what is
kept per row is compiled for powers of two, of which unrecorded steps use the largest only (`AttentionMeta.pad_rows`),
and directions are data. Called by `common.engine.device_steps` at warm-up and by `compile_offline`; `compilations`
counts what is compiled all the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import structlog
import torch
from torch import Tensor
from triton import knobs
from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.jit import JITFunction

from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.batch_invariance import FixedProduct
from cohort.kernels.code_dtypes import E2M1, E8M0, bits_of
from cohort.kernels.fp8_cache import PLANE_SCALE_BYTES
from cohort.kernels.gpu import elementwise, slots
from cohort.kernels.gpu.attention import attention, latents, prefill
from cohort.kernels.gpu.plan import DecodePlan, padded_rows
from cohort.kernels.gpu.products import coded, experts, fixed_products
from cohort.kernels.gpu.sampling import sampling
from cohort.kernels.types import EDIT_KINDS, ExpertCodes, SampledRows, SamplingTables, ServedProduct

_log = structlog.get_logger(__name__)

Launch = Callable[[], object]
_WIDE_WINDOW = 1 << 20  # wide enough for rows to be read in parts, which are merged


@dataclass(frozen=True, slots=True)
class ServedExperts:
    """Experts whose products are grouped on the device."""

    count: int
    per_token: int
    inner: int
    shared_inner: int  # of an expert that every token takes, too; 0 = there is none
    rounded: bool  # their weights are of the model's type, else float32
    clamped: bool = False  # their activation is gpt-oss's, and their products have biases


@dataclass(frozen=True, slots=True)
class ServedLatents:
    """Latents of a model as the kernels see them. `query_rank`: size of the compressed queries; 0 = not compressed."""

    rank: int
    rotated: int
    query_rank: int

    @property
    def width(self) -> int:
        return self.rank + self.rotated


@dataclass(frozen=True, slots=True)
class Served:
    """Shapes and kinds of a model, as far as kernels are compiled for them."""

    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    inner: int
    vocabulary: int
    dtype: torch.dtype
    block_size: int = 16
    rotary_half: int = 0  # of a head's elements; 0 for models that leave all but attention to other kernels
    windowed: frozenset[bool] = frozenset({False})  # whether layers have a sliding window, some or none
    sinks: bool = False  # of attention
    capped: bool = False  # attention bounds its scores
    experts: ServedExperts | None = None
    products: tuple[ServedProduct, ...] = ()  # over weights in codes
    layers: int = 2
    fp8: bool = False  # keys and values are stored so
    wide_norms: bool = False  # weights of norms are in float32
    batch_invariant: bool = False  # attention is `positions`'
    fixed: tuple[FixedProduct, ...] = ()  # over plain weights, if batch-invariant
    gelu: bool = False  # the activation is Gemma's
    latents: ServedLatents | None = None  # in place of keys and values


def row_classes(max_rows: int) -> tuple[int, ...]:
    """Return the numbers of rows that kernels are compiled for: powers of two up to the one that holds `max_rows`."""
    most = padded_rows(max_rows)
    return tuple(size for size in (1 << power for power in range(most.bit_length())) if size >= padded_rows(1))


def launches(
    served: Served, max_rows: int, device: torch.device, plan: DecodePlan | None = None
) -> Iterator[tuple[str, Launch]]:
    """Yield each launch that steps of up to `max_rows` rows make, named; on tensors with the strides of the engine's.

    The tensors are small and their content has no meaning: compile, but never run these.
    """
    step = _Tensors(served, device)
    if served.latents is not None:
        yield from _of_latents(served.latents, step, max_rows, plan)
    elif served.batch_invariant:
        yield from _of_positions(step, padded_rows(max_rows))
    else:
        yield from _of_rows(step, max_rows, plan)
    if served.latents is None:
        yield from step.elementwise()
    if served.experts is not None:
        yield from _of_experts(served.experts, step, device)
    for product in served.products:
        yield from _of_codes(product, served.dtype, device)
    for plain in served.fixed:
        yield from _of_fixed(plain, served.dtype)
    yield "sample", lambda: sampling.sample_rows(*_sampled(served, device))


def _of_positions(step: _Tensors, rows: int) -> Iterator[tuple[str, Launch]]:
    """Yield attention of batch-invariant steps: one variant serves all rows, so the others compile nothing."""
    for window in step.windows:
        for count in (1, rows):
            for _, query, out in step.queries(count):
                meta = step.meta(count, prefill_rows=0)
                yield (
                    f"every row, window {window}",
                    lambda q=query, o=out, m=meta, w=window: attention.invariant(
                        q, step.kv, step.layer, m, 1.0, o, w, step.sinks, step.cap
                    ),  # type: ignore[misc]
                )


def _of_fixed(product: FixedProduct, dtype: torch.dtype) -> Iterator[tuple[str, Launch]]:
    """Yield a product in parts and at once, into a place of the model's type, into float32, and added to a residual.
    Its tensors take no memory, which belongs to the cache by now."""
    weight = torch.empty((product.outputs, product.inputs), dtype=dtype, device="meta")
    bias = torch.empty(product.outputs, dtype=dtype, device="meta") if product.biased else None
    for rows in (1, 129):
        x = torch.empty((rows, product.inputs), dtype=dtype, device="meta")
        for into, kind, add in (("", dtype, False), (", float32", torch.float32, False), (", added", dtype, True)):
            if not (add and product.biased):
                out = torch.empty((rows, product.outputs), dtype=kind, device="meta")
                yield (
                    f"{product.outputs} x {product.inputs}{into}",
                    lambda x=x, o=out, a=add: fixed_products.fixed_product(x, weight, bias, o, add=a),  # type: ignore[misc]
                )


def _of_rows(step: _Tensors, max_rows: int, plan: DecodePlan | None) -> Iterator[tuple[str, Launch]]:
    """Yield attention by kind of row."""
    at_most = padded_rows(max_rows)
    for rows in row_classes(max_rows):
        for window in step.windows:
            for name, query, out in step.queries(rows):
                meta = step.meta(rows, prefill_rows=0)
                yield (
                    f"decode {name} {rows} rows, window {window}",
                    lambda q=query, o=out, m=meta, w=window: attention.decode(
                        q, step.kv, step.layer, m, 1.0, o, w, plan, step.sinks, step.cap
                    ),  # type: ignore[misc]
                )
    every = step.meta(at_most, prefill_rows=at_most)
    for window in step.windows:
        for name, query, out in step.queries(at_most):
            yield (
                f"prefill {name}, window {window}",
                lambda q=query, o=out, w=window: attention.prefill(
                    q, step.kv, step.layer, every, 1.0, o, w, step.sinks, step.cap
                ),  # type: ignore[misc]
            )
    staging = step.empty(2, 64, step.served.kv_heads, step.served.head_dim)
    starts = step.empty(at_most + 1, dtype=torch.int32)
    yield "stage", lambda: prefill.stage(step.kv, step.layer, every, staging, starts)


def _of_latents(
    shape: ServedLatents, step: _Tensors, max_rows: int, plan: DecodePlan | None
) -> Iterator[tuple[str, Launch]]:
    """Yield attention over latents, and what is elementwise."""
    s, kv, layer, tokens, width = step.served, step.kv, step.layer, 8, shape.width
    for rows in row_classes(max_rows):
        meta = step.meta(rows, prefill_rows=0)
        query, out = step.empty(rows, s.query_heads, width), step.empty(rows, s.query_heads, width)
        yield (
            f"decode latents {rows} rows",
            lambda q=query, o=out, m=meta: latents.decode(q, kv, layer, m, 1.0, o, shape.rank, plan),  # type: ignore[misc]
        )
    most = padded_rows(max_rows)
    queries, outs = step.empty(most, s.query_heads, width), step.empty(most, s.query_heads, width)
    every = step.meta(most, prefill_rows=most)
    yield "prefill latents", lambda: latents.prefill(queries, kv, layer, every, 1.0, outs, shape.rank)
    positions = step.positions(tokens)
    turned, latent = step.empty(tokens, s.query_heads, width), step.empty(tokens, 1, width)
    turn = step.empty(64, shape.rotated // 2, dtype=torch.float32)
    yield (
        "rotate",
        lambda: elementwise.rope_inplace(turned[:, :, shape.rank :], latent[:, :, shape.rank :], turn, turn, positions),
    )
    yield "store", lambda: elementwise.write_kv(latent, latent, kv, layer, positions)
    yield from step.copies(positions)
    normed = [("norm", step.empty(tokens, s.hidden)), ("norm of latent", latent[:, 0, : shape.rank])]
    if shape.query_rank:
        normed.append(("norm of query", step.empty(tokens, shape.query_rank)))
    for name, x in normed:
        weight = step.empty(x.shape[1])
        yield name, lambda x=x, w=weight: elementwise.rms_norm(x, w, 1e-5, x)  # type: ignore[misc]
    both, inner = step.empty(tokens, 2 * s.inner), step.empty(tokens, s.inner)
    yield "activate", lambda: elementwise.silu_mul(both, inner)


class _Tensors:
    """Inputs of one step's kernels, eight tokens."""

    def __init__(self, served: Served, device: torch.device) -> None:
        self.served, self._device = served, device
        self.sinks = torch.zeros(served.query_heads, device=device) if served.sinks else None
        self.cap = 50.0 if served.capped else 0.0
        self.windows = [_WIDE_WINDOW if windowed else 0 for windowed in sorted(served.windowed)]
        self.layer = min(1, served.layers - 1)
        """Layer to launch for: not the first where there is another, as that one begins where the cache does."""
        kinds, heads, row = 2, served.kv_heads, served.head_dim + (PLANE_SCALE_BYTES if served.fp8 else 0)
        if served.latents is not None:
            kinds, heads, row = 1, 1, served.latents.width
        shape = (4, served.layers, kinds, heads, served.block_size, row)
        self.kv = self.empty(*shape, dtype=torch.uint8 if served.fp8 else served.dtype)

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.served.dtype, device=self._device)

    def positions(self, tokens: int) -> Tensor:
        return torch.zeros(tokens, dtype=torch.int64, device=self._device)

    def copies(self, places: Tensor) -> Iterator[tuple[str, Launch]]:
        """Yield the copies of whole tokens from and to these slots."""
        _, layers, kinds, heads, _, row = self.kv.shape
        copied = self.empty(len(places), layers, kinds, heads, row, dtype=self.kv.dtype)
        yield "gather", lambda: slots.gather_slots(self.kv, places, copied)
        yield "scatter", lambda: slots.scatter_slots(copied, self.kv, places)

    def _fused(self, rows: int) -> tuple[Tensor, ...]:
        """Return query, key and value as views of one projection, as the lean models have them."""
        s = self.served
        return torch.split(
            self.empty(rows, s.query_heads + 2 * s.kv_heads, s.head_dim), [s.query_heads, s.kv_heads, s.kv_heads], 1
        )

    def queries(self, rows: int) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield queries and outputs: in a fused projection, and on their own where that makes a difference."""
        s = self.served
        fused, out = self._fused(rows)[0], self.empty(rows, s.query_heads, s.head_dim)
        yield "fused", fused, out
        if fused.stride(0) % 16 != out.stride(0) % 16:
            yield "own", torch.empty_like(out), out

    def meta(self, rows: int, prefill_rows: int) -> AttentionMeta:
        starts = torch.zeros(rows + 1, dtype=torch.int32, device=self._device)
        tables = torch.zeros((rows, 64), dtype=torch.int32, device=self._device)
        return AttentionMeta(starts, starts[1:], tables, None, self.served.block_size, 16, prefill_rows, 1024, 64)

    def elementwise(self) -> Iterator[tuple[str, Launch]]:
        s, tokens = self.served, 8
        query, key, value = self._fused(tokens)
        positions = self.positions(tokens)
        yield from self.copies(positions)
        if s.rotary_half:
            cos = self.empty(64, s.rotary_half, dtype=torch.float32)
            yield (
                "rotate and store",
                lambda: elementwise.rope_and_write_kv(
                    query, key, value, cos, cos, positions, self.kv, self.layer, positions
                ),
            )
            yield "rotate", lambda: elementwise.rope_inplace(query, key, cos, cos, positions)
        yield "store", lambda: elementwise.write_kv(key, value, self.kv, self.layer, positions)
        own = torch.empty_like(key, memory_format=torch.contiguous_format)
        if own.stride(0) % 16 != key.stride(0) % 16:
            yield "store own", lambda: elementwise.write_kv(own, own, self.kv, self.layer, positions)
        if not s.rotary_half:
            return
        hidden, both = self.empty(tokens, s.hidden), self.empty(tokens, 2 * s.inner)
        kind = torch.float32 if s.wide_norms else s.dtype
        weight, of_head = self.empty(s.hidden, dtype=kind), self.empty(s.head_dim, dtype=kind)
        yield "norm", lambda: elementwise.rms_norm(hidden, weight, 1e-5, hidden)
        for name, heads in (("query", query), ("key", key)):
            yield f"norm of {name}", lambda x=heads: elementwise.rms_norm(x, of_head, 1e-5, x)  # type: ignore[misc]
        inner = self.empty(tokens, s.inner)
        if not s.gelu:
            yield "activate", lambda: elementwise.silu_mul(both, inner)
        elif s.batch_invariant:  # else torch activates
            logits = self.empty(2, s.vocabulary, dtype=torch.float32)
            yield "activate", lambda: elementwise.gelu_mul(both, inner)
            yield "cap", lambda: elementwise.soft_cap(logits, 30.0)


def _of_experts(mixture: ServedExperts, step: _Tensors, device: torch.device) -> Iterator[tuple[str, Launch]]:
    """Yield a mixture's kernels: for rows that are few for their experts, and for many."""
    served, count, hidden, fixed = step.served, mixture.count, step.served.hidden, step.served.batch_invariant
    gate_up = torch.empty((count, 2 * mixture.inner, hidden), dtype=served.dtype, device="meta")
    down = torch.empty((count, hidden, mixture.inner), dtype=served.dtype, device="meta")
    starts = torch.zeros(count + 1, dtype=torch.int32, device=device)
    for name, tokens in (("few", 1), ("many", 17 * count)):
        x, order = step.empty(tokens, hidden), step.positions(tokens * mixture.per_token)
        if mixture.clamped:
            inner = step.empty(len(order), mixture.inner)
            for what, rows, weight, k in (("into", x, gate_up, mixture.per_token), ("out of", inner, down, 0)):
                bias = step.empty(*weight.shape[:2])
                yield (
                    f"{what} experts, {name} rows",
                    lambda x=rows, o=order, w=weight, b=bias, k=k: experts.products(  # type: ignore[misc]
                        x, o, starts, w, b, per_token=k, fixed=fixed
                    ),
                )
            continue
        yield (
            f"experts, {name} rows",
            lambda x=x, o=order: experts.grouped_products(  # type: ignore[misc]
                x, o, starts, gate_up, down, per_token=mixture.per_token, fixed=fixed
            ),
        )
    if mixture.clamped:
        yield "activate experts", _clamped(mixture.inner, served.dtype, device)
    weights = step.empty(2, mixture.per_token, dtype=None if mixture.rounded else torch.float32)
    parts, total = step.empty(2 * mixture.per_token, hidden), step.empty(2, hidden)
    own = total if mixture.shared_inner else None
    if mixture.shared_inner:
        both, shared = step.empty(2, 2 * mixture.shared_inner), step.empty(2, mixture.shared_inner)
        yield "activate shared", lambda: elementwise.silu_mul(both, shared)
    yield "weighted sum", lambda: experts.add_weighted(parts, weights, own, total)


def _of_codes(product: ServedProduct, dtype: torch.dtype, device: torch.device) -> Iterator[tuple[str, Launch]]:
    """Yield a product's two plans, each into a place of the model's type, into float32, and added to a residual."""
    stored = product.inputs * bits_of(product.codes) // 8
    if product.experts:
        yield from _of_coded_experts(product, stored, dtype, device)
        return
    codes = torch.empty((product.outputs, stored), dtype=product.codes, device="meta")
    scales = torch.empty((product.outputs, -(-product.inputs // product.group)), dtype=_scale(product), device="meta")
    bias = torch.empty(product.outputs, dtype=dtype, device=device) if product.biased else None
    for rows in (1, 17):
        x = torch.empty((rows, product.inputs), dtype=dtype, device=device)
        for into, kind, add in (("", dtype, False), (", float32", torch.float32, False), (", added", dtype, True)):
            if add and product.biased:
                continue
            out = torch.empty((rows, product.outputs), dtype=kind, device=device)
            name = f"{product.codes} {product.outputs} x {product.inputs}, {rows} rows{into}"
            yield (
                name.removeprefix("torch."),
                lambda x=x, o=out, a=add: coded.coded_product(  # type: ignore[misc]
                    x,
                    codes,
                    scales,
                    scales if product.offsets else None,
                    product.group,
                    bias,
                    o,
                    add=a,
                    fixed=product.fixed,
                ),
            )


def _of_coded_experts(
    product: ServedProduct, stored: int, dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Launch]]:
    """Yield products for rows that are few for their experts, and for many; after the first product its activation."""
    shape = (product.experts, product.outputs)
    codes = torch.empty((*shape, stored), dtype=product.codes, device="meta")
    scales = torch.empty((*shape, -(-product.inputs // product.group)), dtype=_scale(product), device="meta")
    bias = torch.empty(shape, dtype=dtype, device=device) if product.biased else None
    weight = ExpertCodes(codes, scales, scales if product.offsets else None, product.group)
    starts = torch.zeros(product.experts + 1, dtype=torch.int32, device=device)
    for name, rows in (("few", 2), ("many", 18 * product.experts)):
        tokens = rows // 2 if product.gathers else rows
        x = torch.empty((tokens, product.inputs), dtype=dtype, device=device)
        order = torch.zeros(rows, dtype=torch.int64, device=device)
        yield (
            f"experts of {product.codes} {product.outputs} x {product.inputs}, {name} rows".replace("torch.", ""),
            lambda x=x, o=order, k=2 * product.gathers: experts.products(  # type: ignore[misc]
                x, o, starts, weight, bias, per_token=k, fixed=product.fixed
            ),
        )
    if product.gathers and product.clamped:
        yield "activate experts", _clamped(product.outputs // 2, dtype, device)
    elif product.gathers:
        both = torch.empty((2, product.outputs), dtype=dtype, device=device)
        yield "activate experts", lambda: elementwise.silu_mul(both, both.new_empty((2, product.outputs // 2)))


def _scale(product: ServedProduct) -> torch.dtype:
    return E8M0 if product.codes == E2M1 else torch.float32


def _clamped(inner: int, dtype: torch.dtype, device: torch.device) -> Launch:
    both = torch.empty((2, 2 * inner), dtype=dtype, device=device)
    return lambda: elementwise.clamped_swiglu(both, 1.702, 7.0, both.new_empty((2, inner)), in_turn=True)


def _sampled(served: Served, device: torch.device) -> tuple[Tensor, SamplingTables, SampledRows]:
    logits = torch.empty((2, served.vocabulary), dtype=torch.float32, device=device)
    wide, narrow = torch.zeros(2, dtype=torch.int64, device=device), torch.zeros(2, device=device)
    counts = torch.zeros(2 * EDIT_KINDS + 1, dtype=torch.int32, device=device)
    tables = SamplingTables(
        wide, wide, narrow.double(), narrow, narrow, counts[:2], counts[:2], counts, counts, narrow, narrow
    )
    return logits, tables, SampledRows.empty(2, 1, device)


@contextmanager
def compile_only(compiled: list[Any] | None = None) -> Iterator[None]:
    """Compile the variants of launches made within, and run nothing; results go to `compiled`."""
    run = JITFunction.run

    def compiling(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        result = run(kernel, *args, grid=grid, warmup=True, **options)
        if compiled is not None:
            compiled.append(result)

    JITFunction.run = compiling  # type: ignore[method-assign]
    try:
        yield
    finally:
        JITFunction.run = run  # type: ignore[method-assign]


def precompile(served: Served, max_rows: int, device: torch.device, threads: int) -> int:
    """Compile all of `launches` on `threads` threads; return their number. Nothing may be launched meanwhile."""
    every = list(launches(served, max_rows, device))
    with ThreadPoolExecutor(threads, thread_name_prefix="compile") as pool, compile_only(), AsyncCompileMode(pool):
        for _, launch in every:
            launch()
    _log.info("kernels compiled", launches=len(every), compiled=compilations.count)
    return len(every)


class _Compilations:
    """Number of variants that this process compiled, or read from the cache folder: either way a launch waited."""

    def __init__(self) -> None:
        self.count = 0
        self._counting = threading.Lock()
        self._next: Any = None
        self._watching = False

    def watch(self) -> None:
        """Count from now on; once per process is enough."""
        with self._counting:
            if not self._watching:
                self._watching = True
                self._next = knobs.runtime.jit_post_compile_hook
                knobs.runtime.jit_post_compile_hook = self._compiled

    def _compiled(self, **facts: Any) -> Any:
        with self._counting:
            self.count += 1
        name = facts["fn"].name
        _log.debug("kernel compiled", kernel=name)
        return self._next(**facts) if self._next is not None else None


compilations = _Compilations()
