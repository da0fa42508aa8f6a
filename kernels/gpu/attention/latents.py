"""Attention over latents on a GPU: plans, the launches of prefill and decode rows, and the variants they compile.

Called by `kernels.latent_attention` once per layer, and by `variants` at warm-up. Both kinds of rows read the paged
cache; flash attention takes no keys of 576 numbers. Absorbed queries make a prompt's scores and sums three times as
many operations as keys and values of every head would, and no memory for these (DeepSeek-V2 §2.1.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.gpu import elementwise, slots
from cohort.kernels.gpu.attention.attention import WIDEN_PRODUCTS, longest_read, padded
from cohort.kernels.gpu.attention.attention_kernels import merge_parts
from cohort.kernels.gpu.attention.latent_kernels import decode_latents, prefill_latents
from cohort.kernels.gpu.plan import (
    DecodePlan,
    PrefillPlan,
    latent_decode_plan,
    latent_group,
    latent_prefill_plan,
    padded_rows,
    power_of_two_from,
)
from cohort.kernels.gpu.workspace import multiprocessors

_MERGED_AT_ONCE = 16
_multiprocessors = lru_cache(multiprocessors)


def latent_attention(
    query: Tensor, kv: Tensor, layer: int, meta: AttentionMeta, scale: float, out: Tensor, rank: int
) -> None:
    """As `kernels.latent_attention.latent_attention`.

    R14 · Rows before `meta.num_prefill_rows` are taken as prefill, the others have at most one token each.
    """
    _check(query, kv, meta, out, rank)
    if meta.num_prefill_rows:
        prefill(query, kv, layer, meta, scale, out, rank)
    if len(meta.context_lens) > meta.num_prefill_rows:
        decode(query, kv, layer, meta, scale, out, rank)


def _check(query: Tensor, kv: Tensor, meta: AttentionMeta, out: Tensor, rank: int) -> None:
    """Raise `ValueError` or `TypeError` for what the kernels would misread; looks at shapes and types only."""
    if not kv.is_contiguous() or kv.shape[2:4] != (1, 1):
        raise ValueError(f"the cache {list(kv.shape)} must be contiguous, one latent of a token")
    if not query.dtype == kv.dtype == out.dtype:
        raise TypeError(f"query {query.dtype}, cache {kv.dtype} and out {out.dtype} must be of one type")
    if query.shape != out.shape or query.shape[2] != kv.shape[5] or not 0 < rank < kv.shape[5]:
        raise ValueError(f"query {list(query.shape)} and out {list(out.shape)} do not fit a cache {list(kv.shape)}")
    if query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("the elements of a head must lie side by side")
    if meta.block_size != kv.shape[4] or meta.directions is not None:
        raise ValueError(f"tables of blocks of {kv.shape[4]}, with directions in their signs, expected")
    for name in ("query_start", "context_lens", "block_tables"):
        if getattr(meta, name).dtype != torch.int32:
            raise TypeError(f"{name} must be int32")


def _shape(kv: Tensor, rank: int) -> dict[str, int]:
    rotated = kv.shape[5] - rank
    return {
        "BLOCK_SIZE": kv.shape[4],
        "RANK": rank,
        "PAD_RANK": padded(rank),
        "ROTATED": rotated,
        "PAD_ROTATED": padded(rotated),
    }


def prefill(
    query: Tensor,
    kv: Tensor,
    layer: int,
    meta: AttentionMeta,
    scale: float,
    out: Tensor,
    rank: int,
    plan: PrefillPlan | None = None,
) -> None:
    """The step's prefill rows."""
    cache, heads = kv[:, layer], query.shape[1]
    group = latent_group(heads, query.element_size())
    plan = plan or latent_prefill_plan(group=group, element_bytes=query.element_size())
    prefill_latents[(heads // group, meta.num_prefill_rows, -(-meta.max_query_len // plan.tile_tokens))](
        query,
        cache,
        meta.query_start,
        meta.context_lens,
        meta.block_tables,
        out,
        scale * math.log2(math.e),
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        meta.block_tables.stride(0),
        cache.stride(0),
        GROUP=group,
        **_shape(kv, rank),
        TILE_ROWS=plan.tile_rows,
        TILE_TOKENS=plan.tile_tokens,
        TILE_KEYS=plan.tile_keys,
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
    rank: int,
    plan: DecodePlan | None = None,
) -> None:
    """The step's decode rows; a CUDA graph may capture it."""
    cache, heads, first = kv[:, layer], query.shape[1], meta.num_prefill_rows
    rows = len(meta.context_lens) - first
    group = latent_group(heads, query.element_size())
    tiles = heads // group
    plan = plan or latent_decode_plan(
        group=group, element_bytes=query.element_size(), multiprocessors=_multiprocessors(kv.device)
    )
    parts = plan.parts(rows, tiles)
    if meta.workspace is not None:
        partial, lse = meta.workspace.partial, meta.workspace.lse
        if parts * heads > len(lse):
            raise ValueError(f"a workspace for fewer than {rows} rows")
    else:
        partial = torch.empty(parts * heads * rank, dtype=torch.float32, device=kv.device)
        lse = torch.empty(parts * heads, dtype=torch.float32, device=kv.device)
    shared = {
        "GROUP": group,
        "PAD_ROWS": padded_rows(rows, meta.pad_rows),
        "TILE_KEYS": plan.tile_keys,
        "MIN_PART_KEYS": plan.min_part_keys,
    }
    decode_latents[(plan.programs,)](
        query,
        cache,
        meta.query_start,
        meta.context_lens,
        meta.block_tables,
        out,
        partial,
        lse,
        first,
        rows,
        plan.items,
        scale * math.log2(math.e),
        query.stride(0),
        query.stride(1),
        out.stride(0),
        out.stride(1),
        meta.block_tables.stride(0),
        cache.stride(0),
        HEAD_TILES=tiles,
        **_shape(kv, rank),
        TILE_ROWS=max(16, power_of_two_from(group)),
        WIDE=WIDEN_PRODUCTS,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **shared,
    )
    if longest_read(meta) > plan.min_part_keys:
        merge_parts[(tiles, rows)](
            partial,
            lse,
            meta.query_start,  # for sinks, which there are none of
            meta.query_start,
            meta.context_lens,
            out,
            first,
            rows,
            plan.items,
            0,
            out.stride(0),
            out.stride(1),
            KV_HEADS=tiles,
            HEAD_DIM=rank,
            PAD_DIM=padded(rank),
            AT_ONCE=_MERGED_AT_ONCE,
            WINDOWED=False,
            SINKS=False,
            num_warps=4,
            **shared,
        )


@dataclass(frozen=True, slots=True)
class ServedLatents:
    """A model's latents as the kernels see them. `query_rank`: queries come by way of so many numbers; 0 = directly."""

    rank: int
    rotated: int
    query_rank: int

    @property
    def width(self) -> int:
        return self.rank + self.rotated


def launches(
    served: ServedLatents,
    *,
    heads: int,
    hidden: int,
    inner: int,
    dtype: torch.dtype,
    block_size: int,
    layers: int,
    row_classes: tuple[int, ...],
    device: torch.device,
    plan: DecodePlan | None = None,
) -> Iterator[tuple[str, Callable[[], None]]]:
    """Of `variants.launches`, what such a model's layers launch beside experts and sampling."""

    def empty(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    at_most, tokens, width = row_classes[-1], 8, served.width
    layer, kv = min(1, layers - 1), empty(4, layers, 1, 1, block_size, width)
    for rows in (*row_classes, 0):
        many = rows or at_most
        starts = torch.zeros(many + 1, dtype=torch.int32, device=device)
        tables = torch.zeros((many, 64), dtype=torch.int32, device=device)
        prefill_rows = 0 if rows else many
        meta = AttentionMeta(starts, starts[1:], tables, None, block_size, 16, prefill_rows, 1024, 64)
        query, out = empty(many, heads, width), empty(many, heads, width)
        if rows:
            yield (
                f"decode latents {rows} rows",
                lambda q=query, o=out, m=meta: decode(q, kv, layer, m, 1.0, o, served.rank, plan),  # type: ignore[misc]
            )
        else:
            yield (
                "prefill latents",
                lambda q=query, o=out, m=meta: prefill(q, kv, layer, m, 1.0, o, served.rank),  # type: ignore[misc]
            )
    positions = torch.zeros(tokens, dtype=torch.int64, device=device)
    query, latent = empty(tokens, heads, width), empty(tokens, 1, width)
    turn = empty(64, served.rotated // 2, kind=torch.float32)
    yield (
        "rotate",
        lambda: elementwise.rope_inplace(
            query[:, :, served.rank :], latent[:, :, served.rank :], turn, turn, positions
        ),
    )
    yield "store", lambda: elementwise.write_kv(latent, latent, kv, layer, positions)
    copied = empty(tokens, layers, 1, 1, width)
    yield "gather", lambda: slots.gather_slots(kv, positions, copied)
    yield "scatter", lambda: slots.scatter_slots(copied, kv, positions)
    normed = [("norm", empty(tokens, hidden)), ("norm of latent", latent[:, 0, : served.rank])]
    if served.query_rank:
        normed.append(("norm of query", empty(tokens, served.query_rank)))
    for name, x in normed:
        weight = empty(x.shape[1])
        yield name, lambda x=x, w=weight: elementwise.rms_norm(x, w, 1e-5, x)  # type: ignore[misc]
    both = empty(tokens, 2 * inner)
    yield "activate", lambda: elementwise.silu_mul(both, both.new_empty((tokens, inner)))
