"""Paged attention on a GPU: prefill rows and decode rows of one step, each by the kernel made for it.

Called by `ops.paged_attention` once per layer. Prefill rows in 16 bits go through flash attention (`prefill`), in
float32, or where their gathered context has no room, through our own kernel over the paged cache. A decode row that
carries drafts has several positions, so it is a prefill row here.

Bits: a row's result follows how the step was cut, unlike on a processor (ADR 14). Prefill and decode rows have
kernels of their own, the lengths of all decode rows say into how many parts each one's context is cut
(`plan.DecodePlan`), flash attention chooses its tiles by lengths, and the products around attention by their number of
rows. So a position that was verified as a draft may differ from the same position as a decode step in its last bits,
and the token may differ where two nearly tie. With `engine.batch_invariant` the workspace says so, and `positions`
computes all rows.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor
from triton import knobs

from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.fp8_cache import PLANE_SCALE_BYTES, is_fp8
from cohort.kernels.gpu.attention.attention_kernels import decode_rows, merge_parts, prefill_rows
from cohort.kernels.gpu.attention.positions import attend
from cohort.kernels.gpu.attention.prefill import flash_prefill
from cohort.kernels.gpu.plan import DecodePlan, decode_plan, padded_rows, power_of_two_from, prefill_plan
from cohort.kernels.gpu.workspace import multiprocessors

# The interpreter keeps bfloat16 as bit patterns, which its matrix product takes for integers.
WIDEN_PRODUCTS = bool(knobs.runtime.interpret)
_MERGED_AT_ONCE = 16
_planned = lru_cache(decode_plan)


def paged_attention(
    query: Tensor,
    kv: Tensor,
    layer: int,
    meta: AttentionMeta,
    scale: float,
    out: Tensor,
    *,
    sliding_window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> None:
    """See `ops.paged_attention.paged_attention`. Rows without a context give zeros. Flash attention takes neither
    sinks nor caps; of a cache in FP8 it gets the numbers, gathered in the query's type.

    R14 · Rows before `meta.num_prefill_rows` are taken as prefill, the others have at most one token each.
    """
    check(query, kv, meta, out, sinks)
    if meta.workspace is not None and meta.workspace.batch_invariant:
        invariant(query, kv, layer, meta, scale, out, sliding_window, sinks, softcap)
        return
    own = softcap > 0 or sinks is not None
    if meta.num_prefill_rows and (own or not flash_prefill(query, kv, layer, meta, scale, out, sliding_window)):
        prefill(query, kv, layer, meta, scale, out, sliding_window, sinks, softcap)
    if len(meta.context_lens) > meta.num_prefill_rows:
        decode(query, kv, layer, meta, scale, out, sliding_window, sinks=sinks, softcap=softcap)


def invariant(
    query: Tensor,
    kv: Tensor,
    layer: int,
    meta: AttentionMeta,
    scale: float,
    out: Tensor,
    sliding_window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> None:
    """Compute all rows, each position with the bits that it has in any step; a CUDA graph may capture it."""
    scales, pad_dim = scaling(scale, softcap), padded(query.shape[2])
    attend(query, kv, layer, meta, scales, out, sliding_window, sinks, pad_dim=pad_dim, widen=WIDEN_PRODUCTS)


def check(query: Tensor, kv: Tensor, meta: AttentionMeta, out: Tensor, sinks: Tensor | None = None) -> None:
    """Raise `ValueError` or `TypeError` for what the kernels would misread; looks at shapes and types only."""
    if not kv.is_contiguous():
        raise ValueError("the cache must be contiguous")
    if query.dtype != out.dtype or not (query.dtype == kv.dtype or is_fp8(kv)):
        raise TypeError(f"query {query.dtype}, cache {kv.dtype} and out {out.dtype} must be of one type")
    width = kv.shape[5] - (PLANE_SCALE_BYTES if is_fp8(kv) else 0)
    if query.shape != out.shape or query.shape[2] != width or query.shape[1] % kv.shape[3]:
        raise ValueError(f"query {list(query.shape)} and out {list(out.shape)} do not fit a cache {list(kv.shape)}")
    if query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("the elements of a head must lie side by side")
    if meta.block_size != kv.shape[4]:
        raise ValueError(f"blocks of {meta.block_size} in the tables, of {kv.shape[4]} in the cache")
    for name in ("query_start", "context_lens", "block_tables"):
        if getattr(meta, name).dtype != torch.int32:
            raise TypeError(f"{name} must be int32")
    if sinks is not None and (
        sinks.dtype != torch.float32 or sinks.shape != query.shape[1:2] or not sinks.is_contiguous()
    ):
        raise ValueError("sinks must be float32, one per query head")
    if meta.directions is not None:
        raise ValueError("directions belong into the tables' signs; see AttentionMeta.as_signed")


def prefill(
    query: Tensor,
    kv: Tensor,
    layer: int,
    meta: AttentionMeta,
    scale: float,
    out: Tensor,
    sliding_window: int = 0,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> None:
    """Compute the step's prefill rows from the paged cache by our own kernel, in any dtype."""
    cache = kv[:, layer]
    _, _, kv_heads, block_size, _ = cache.shape
    head_dim = query.shape[2]
    group = query.shape[1] // kv_heads
    plan = prefill_plan(group=group, head_dim=head_dim, element_bytes=query.element_size())
    grid = (kv_heads, meta.num_prefill_rows, -(-meta.max_query_len // plan.tile_tokens))
    prefill_rows[grid](
        *meta.tensors(query, cache, out),
        meta.query_start if sinks is None else sinks,  # read with SINKS only
        *scaling(scale, softcap),
        sliding_window,
        *meta.strides(query, cache, out),
        GROUP=group,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        PAD_DIM=padded(head_dim),
        TILE_ROWS=plan.tile_rows,
        TILE_TOKENS=plan.tile_tokens,
        TILE_KEYS=plan.tile_keys,
        WINDOWED=sliding_window > 0,
        SINKS=sinks is not None,
        CAPPED=softcap > 0,
        FP8=is_fp8(kv),
        WIDE=WIDEN_PRODUCTS,
        num_warps=plan.warps,
        num_stages=plan.stages,
    )


def decode(
    query: Tensor,
    kv: Tensor,
    layer: int,
    meta: AttentionMeta,
    scale: float,
    out: Tensor,
    sliding_window: int = 0,
    plan: DecodePlan | None = None,
    sinks: Tensor | None = None,
    softcap: float = 0.0,
) -> None:
    """Compute the step's decode rows; a CUDA graph may capture it. `plan`: other than `decode_plan`'s, for tests and
    measuring; a workspace must then have been made large enough."""
    cache = kv[:, layer]
    _, _, kv_heads, block_size, _ = cache.shape
    heads, head_dim, first = query.shape[1], query.shape[2], meta.num_prefill_rows
    rows = len(meta.context_lens) - first
    plan = plan or _planned(
        head_dim=head_dim,
        element_bytes=query.element_size(),
        multiprocessors=multiprocessors(kv.device),
        fp8=is_fp8(kv),
    )
    partial, lse = parts_memory(meta, plan.parts(rows, kv_heads), heads, head_dim)
    group = heads // kv_heads
    shared = {
        "GROUP": group,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "PAD_DIM": padded(head_dim),
        "PAD_ROWS": padded_rows(rows, meta.pad_rows),
        "TILE_KEYS": plan.tile_keys,
        "MIN_PART_KEYS": plan.min_part_keys,
        "WINDOWED": sliding_window > 0,
        "SINKS": sinks is not None,
    }
    decode_rows[(plan.programs,)](
        *meta.tensors(query, cache, out),
        partial,
        lse,
        meta.query_start if sinks is None else sinks,  # read with SINKS only
        first,
        rows,
        plan.items,
        *scaling(scale, softcap),
        sliding_window,
        *meta.strides(query, cache, out),
        BLOCK_SIZE=block_size,
        CAPPED=softcap > 0,
        FP8=is_fp8(kv),
        TILE_ROWS=max(16, power_of_two_from(group)),
        WIDE=WIDEN_PRODUCTS,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **shared,
    )
    if longest_read(meta, sliding_window) > plan.min_part_keys:
        merge_parts[(kv_heads, rows)](
            partial,
            lse,
            meta.query_start if sinks is None else sinks,
            meta.query_start,
            meta.context_lens,
            out,
            first,
            rows,
            plan.items,
            sliding_window,
            *out.stride()[:2],
            AT_ONCE=_MERGED_AT_ONCE,
            num_warps=4,
            **shared,
        )


def parts_memory(meta: AttentionMeta, parts: int, heads: int, width: int) -> tuple[Tensor, Tensor]:
    """Return memory for the averages and the levels of `parts` parts, the workspace's if there is one."""
    if meta.workspace is None:
        sizes, device = (parts * heads * width, parts * heads), meta.block_tables.device
        averages, levels = (torch.empty(size, dtype=torch.float32, device=device) for size in sizes)
        return averages, levels
    if parts * heads > len(meta.workspace.lse):
        raise ValueError(f"a workspace for fewer than {len(meta.context_lens) - meta.num_prefill_rows} rows")
    return meta.workspace.partial, meta.workspace.lse


def scaling(scale: float, softcap: float) -> tuple[float, float]:
    """Return the factor of products and the bound of scores, in units of log2. cap · tanh(y) is cap − 2 · cap / (1 +
    e^2y), so with a cap products become 2 · log2(e) · y."""
    if softcap > 0:
        return 2 * math.log2(math.e) * scale / softcap, softcap * math.log2(math.e)
    return scale * math.log2(math.e), 0.0


def longest_read(meta: AttentionMeta, sliding_window: int = 0) -> int:
    """Return a bound, known to the host, of the keys that a row reads."""
    longest = meta.max_context_len or meta.block_tables.shape[1] * meta.block_size
    return min(longest, sliding_window or longest)


def padded(head_dim: int) -> int:
    """Round up for Triton: its tiles are powers of two, its matrix products at least 16 wide."""
    return max(16, power_of_two_from(head_dim))
