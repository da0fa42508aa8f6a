# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""Attention over latents on a GPU (multi-head latent attention, DeepSeek-V2 §2.1): one vector of a token, all heads'.

Called by `ops.paged_attention` once per layer, and by `variants` at warm-up. Both kinds of rows read the paged cache;
flash attention takes no keys of 576 numbers. A latent's first RANK numbers are key and value, the ROTATED after them
key alone. Absorbed queries make a prompt's scores and sums three times as many operations as keys and values of every
head would, and no memory for these (§2.1.2). A tile of them meets latents as they lie: each is read once for all the
heads of a tile, and what is read as a key is the value too. Where a token lies, parts of contexts, and scores in units
of log2 are as in `attention_kernels`, whose `merge_parts` joins the parts.
"""

import math

import torch
import triton  # reads annotations: they are not to be postponed here
import triton.language as tl
from torch import Tensor

from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.gpu.attention.attention import WIDEN_PRODUCTS, longest_read, padded, parts_memory
from cohort.kernels.gpu.attention.attention_kernels import _VARYING, _parts, merge_parts
from cohort.kernels.gpu.attention.attention_tiles import product
from cohort.kernels.gpu.plan import (
    DecodePlan,
    latent_decode_plan,
    latent_group,
    latent_prefill_plan,
    padded_rows,
    power_of_two_from,
)
from cohort.kernels.gpu.workspace import multiprocessors

_MERGED_AT_ONCE = 16


@triton.jit
def _over_latents(
    query,
    turned_query,
    latents,
    block_table,
    begin,
    end,
    position,
    scale,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    PAD_RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    PAD_ROTATED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sum the softmax-weighted latents [begin, end): the sum [TILE_ROWS, PAD_RANK], its peak score and its weight."""
    dim = tl.arange(0, PAD_RANK)
    turned = tl.arange(0, PAD_ROTATED)
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([TILE_ROWS], tl.float32)
    total = tl.zeros([TILE_ROWS, PAD_RANK], tl.float32)
    for first in range(begin, end, TILE_KEYS):
        key_position = first + tl.arange(0, TILE_KEYS)
        valid = key_position < end
        index = key_position // BLOCK_SIZE
        slot = key_position % BLOCK_SIZE
        block = tl.load(block_table + index, mask=valid, other=0)
        slot = tl.where(block < 0, BLOCK_SIZE - 1 - slot, slot)
        block = (block ^ (block >> 31)).to(tl.int64)
        cell = latents + (block * block_stride + slot * (RANK + ROTATED))[:, None]
        wanted = valid[:, None]
        wanted_turned = valid[:, None]
        if PAD_RANK != RANK:
            wanted = wanted & (dim < RANK)[None, :]
        if PAD_ROTATED != ROTATED:
            wanted_turned = wanted_turned & (turned < ROTATED)[None, :]
        latent = tl.load(cell + dim[None, :], mask=wanted, other=0.0)
        turned_key = tl.load(cell + RANK + turned[None, :], mask=wanted_turned, other=0.0)
        score = tl.zeros([TILE_ROWS, TILE_KEYS], tl.float32)
        score = product(query, tl.trans(latent), score, WIDE)
        score = product(turned_query, tl.trans(turned_key), score, WIDE) * scale
        visible = valid[None, :]
        if CAUSAL:
            visible = visible & (key_position[None, :] <= position[:, None])
        score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        # a tile row that has seen no key yet: -inf less -inf is no number
        above = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(score - above[:, None])
        fade = tl.exp2(peak - above)
        weight = weight * fade + tl.sum(share, 1)
        total = product(share.to(latent.dtype), latent, total * fade[:, None], WIDE)
        peak = higher
    return total, peak, weight


@triton.jit(do_not_specialize=_VARYING)
def decode_latents(
    query,
    kv,
    query_start,
    context_lens,
    block_tables,
    out,
    partial,
    lse,
    first_row,
    rows,
    items,
    scale,
    query_stride,
    query_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    block_stride,
    GROUP: tl.constexpr,
    HEAD_TILES: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    PAD_RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    PAD_ROTATED: tl.constexpr,
    PAD_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MIN_PART_KEYS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute items in turn: one part of one row's latents, for the GROUP heads of one tile. Grid (any number of
    programs).

    A row of one part goes to `out`. Of others each part's average and its log2-sum-exp2 go to `partial` and `lse`,
    [parts of all rows, query heads(, RANK)]. A row without latents (a captured graph's padding) gives zeros.
    """
    parts = _parts(
        query_start, context_lens, first_row, rows, 0, items, HEAD_TILES, PAD_ROWS, MIN_PART_KEYS, TILE_KEYS, False
    )
    end_part = tl.cumsum(parts, 0)
    member = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PAD_RANK)
    turned = tl.arange(0, PAD_ROTATED)
    held = (member < GROUP)[:, None] & (dim < RANK)[None, :]
    held_turned = (member < GROUP)[:, None] & (turned < ROTATED)[None, :]
    for item in range(tl.program_id(0), tl.sum(parts, 0) * HEAD_TILES, tl.num_programs(0)):
        place = item // HEAD_TILES
        done = end_part <= place  # rows all of whose parts come before this one
        row = tl.sum(done.to(tl.int32), 0)
        own_parts = tl.sum(tl.where(tl.arange(0, PAD_ROWS) == row, parts, 0), 0)
        part = place - tl.max(tl.where(done, end_part, 0), 0)
        token = tl.load(query_start + first_row + row).to(tl.int64)
        context = tl.load(context_lens + first_row + row)
        part_keys = tl.cdiv(tl.cdiv(context, own_parts), TILE_KEYS) * TILE_KEYS
        begin = part * part_keys
        head = item % HEAD_TILES * GROUP + member
        query_cell = query + token * query_stride + head[:, None] * query_head_stride
        total, peak, weight = _over_latents(
            tl.load(query_cell + dim[None, :], mask=held, other=0.0),
            tl.load(query_cell + RANK + turned[None, :], mask=held_turned, other=0.0),
            kv,
            block_tables + (first_row + row).to(tl.int64) * table_stride,
            begin,
            tl.minimum(begin + part_keys, context),
            member,
            scale,
            block_stride,
            BLOCK_SIZE,
            RANK,
            PAD_RANK,
            ROTATED,
            PAD_ROTATED,
            TILE_ROWS,
            TILE_KEYS,
            False,
            WIDE,
        )
        some = tl.where(weight > 0, weight, 1.0)
        average = total / some[:, None]
        if own_parts == 1:
            out_cell = out + token * out_stride + head[:, None] * out_head_stride + dim[None, :]
            tl.store(out_cell, average.to(out.dtype.element_ty), mask=held)
        else:
            cell = place.to(tl.int64) * (HEAD_TILES * GROUP) + head
            tl.store(partial + cell[:, None] * RANK + dim[None, :], average, mask=held)
            tl.store(lse + cell, peak + tl.log2(some), mask=member < GROUP)


@triton.jit(do_not_specialize=_VARYING)
def prefill_latents(
    query,
    kv,
    query_start,
    context_lens,
    block_tables,
    out,
    scale,
    query_stride,
    query_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    block_stride,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    RANK: tl.constexpr,
    PAD_RANK: tl.constexpr,
    ROTATED: tl.constexpr,
    PAD_ROTATED: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attend from TILE_TOKENS tokens of one row to the row's whole past in the cache, for the GROUP heads of one tile.

    Grid (tiles of heads, rows, tiles of the longest row); a row's last tiles, which see most, start first.
    """
    row = tl.program_id(1)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    first_token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first_token
    if tile * TILE_TOKENS >= count:
        return
    context = tl.load(context_lens + row)
    tile_row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PAD_RANK)
    turned = tl.arange(0, PAD_ROTATED)
    in_row = tile * TILE_TOKENS + tile_row // GROUP
    head = tl.program_id(0) * GROUP + tile_row % GROUP
    valid = (in_row < count) & (tile_row < TILE_TOKENS * GROUP)
    held = valid[:, None] & (dim < RANK)[None, :]
    token = (first_token + in_row).to(tl.int64)
    query_cell = query + token[:, None] * query_stride + head[:, None] * query_head_stride
    total, _, weight = _over_latents(
        tl.load(query_cell + dim[None, :], mask=held, other=0.0),
        tl.load(query_cell + RANK + turned[None, :], mask=valid[:, None] & (turned < ROTATED)[None, :], other=0.0),
        kv,
        block_tables + row.to(tl.int64) * table_stride,
        0,
        tl.minimum(context - count + (tile + 1) * TILE_TOKENS, context),
        context - count + in_row,
        scale,
        block_stride,
        BLOCK_SIZE,
        RANK,
        PAD_RANK,
        ROTATED,
        PAD_ROTATED,
        TILE_ROWS,
        TILE_KEYS,
        True,
        WIDE,
    )
    average = total / tl.where(weight > 0, weight, 1.0)[:, None]
    out_cell = out + token[:, None] * out_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(out_cell, average.to(out.dtype.element_ty), mask=held)


def latent_attention(
    query: Tensor, kv: Tensor, layer: int, meta: AttentionMeta, scale: float, out: Tensor, rank: int
) -> None:
    """R14 · Take rows before `meta.num_prefill_rows` as prefill; the others have at most one token each."""
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


def prefill(query: Tensor, kv: Tensor, layer: int, meta: AttentionMeta, scale: float, out: Tensor, rank: int) -> None:
    cache, heads = kv[:, layer], query.shape[1]
    group = latent_group(heads, query.element_size())
    plan = latent_prefill_plan(group=group, element_bytes=query.element_size())
    prefill_latents[(heads // group, meta.num_prefill_rows, -(-meta.max_query_len // plan.tile_tokens))](
        *meta.tensors(query, cache, out),
        scale * math.log2(math.e),
        *meta.strides(query, cache, out)[:-2],
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
    """Compute the step's decode rows; a CUDA graph may capture it."""
    cache, heads, first = kv[:, layer], query.shape[1], meta.num_prefill_rows
    rows = len(meta.context_lens) - first
    group = latent_group(heads, query.element_size())
    tiles = heads // group
    plan = plan or latent_decode_plan(
        group=group, element_bytes=query.element_size(), multiprocessors=multiprocessors(kv.device)
    )
    partial, lse = parts_memory(meta, plan.parts(rows, tiles), heads, rank)
    shared = {
        "GROUP": group,
        "PAD_ROWS": padded_rows(rows, meta.pad_rows),
        "TILE_KEYS": plan.tile_keys,
        "MIN_PART_KEYS": plan.min_part_keys,
    }
    decode_latents[(plan.programs,)](
        *meta.tensors(query, cache, out),
        partial,
        lse,
        first,
        rows,
        plan.items,
        scale * math.log2(math.e),
        *meta.strides(query, cache, out)[:-2],
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
            *out.stride()[:2],
            KV_HEADS=tiles,
            HEAD_DIM=rank,
            PAD_DIM=padded(rank),
            AT_ONCE=_MERGED_AT_ONCE,
            WINDOWED=False,
            SINKS=False,
            num_warps=4,
            **shared,
        )
