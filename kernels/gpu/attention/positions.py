# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""Attention on a GPU that gives a position the same bits in every step: prompt, drafted row, decode row (ADR 14).

Called by `attention` where the workspace says so (`engine.batch_invariant`). One kernel with one shape of tile computes
all rows. A context falls into parts of PART_KEYS positions, whatever the step; each part is summed up from nothing,
tile by tile, and parts are joined in order. Which program computes a part, and whether the same one joins it, may
follow the step, because a join is the same few operations either way, each of them rounded once and none left to the
compiler (`attention_tiles.joined`).

How the work is cut is found on the device, so that a recorded step serves whatever its rows hold:

    row of at most one tile of queries, context of several parts ── a program for each part, then `join_parts`
    any other row                                                ── a program for each tile of queries, which joins
"""

from functools import lru_cache

import torch
import triton  # reads annotations: they are not to be postponed here
import triton.language as tl
from torch import Tensor

from cohort.kernels.attention_meta import AttentionMeta
from cohort.kernels.fp8_cache import is_fp8
from cohort.kernels.gpu.attention.attention_tiles import averaged, joined, over_keys
from cohort.kernels.gpu.plan import position_plan, power_of_two_from
from cohort.kernels.gpu.workspace import POSITION_ROOM, multiprocessors

_ROWS_AT_ONCE = 128
_UNROLLED = 4
_HEAD_ELEMENTS = 1024  # of a program that joins
_planned = lru_cache(position_plan)

# Of these Triton compiles no variant for a 1 or a multiple of 16, as in `attention_kernels`: a step of one row must be
# computed by the code that computes all others.
_VARYING = [
    *("rows", "room", "window", "table_stride", "query_stride", "out_stride"),
    *("query_start", "context_lens", "block_tables", "sinks"),
]


@triton.jit
def _parts(count, context, window, TILE_TOKENS: tl.constexpr, PART_KEYS: tl.constexpr, WINDOWED: tl.constexpr):
    """Count the parts of rows' contexts, and those of their `count` queries that go to memory if there is room."""
    parts = tl.cdiv(context, PART_KEYS)
    if WINDOWED:
        parts -= tl.maximum(context - count - window + 1, 0) // PART_KEYS
    return parts, tl.where((count <= TILE_TOKENS) & (parts > 1), count * parts, 0)


@triton.jit
def _rows_at(
    query_start,
    context_lens,
    first,
    rows,
    taken,
    room,
    window,
    AT_ONCE: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    PART_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Return, of the rows from `first` on: items of work for a kv head, whether these are parts of the context, where
    their results begin in memory for `room` queries' parts; and how much of that they and `taken` before want."""
    row = first + tl.arange(0, AT_ONCE)
    valid = row < rows
    begin = tl.load(query_start + row, mask=valid, other=0)
    count = tl.load(query_start + row + 1, mask=valid, other=0) - begin
    context = tl.load(context_lens + row, mask=valid, other=0)
    parts, wanted = _parts(count, context, window, TILE_TOKENS, PART_KEYS, WINDOWED)
    end = taken + tl.cumsum(wanted, 0)
    divided = (wanted > 0) & (end <= room)
    items = tl.where(divided, parts, tl.cdiv(count, TILE_TOKENS))
    return items, divided, end - wanted, taken + tl.sum(wanted, 0)


@triton.jit(do_not_specialize=_VARYING)
def position_rows(
    query,
    kv,
    query_start,
    context_lens,
    block_tables,
    out,
    partial,
    levels,
    sinks,
    rows,
    room,
    scale,
    cap,
    window,
    query_stride,
    query_head_stride,
    out_stride,
    out_head_stride,
    table_stride,
    block_stride,
    value_offset,
    head_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PART_KEYS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute items in turn: TILE_TOKENS tokens of one row for the query heads of one kv head, over one part of the
    row's context or all of them. Grid (any number of programs).

    Sums over one part go to `partial` [room, query heads, HEAD_DIM], their peaks and weights to `levels` [2, room,
    query heads]. Rows without keys give zeros.
    """
    every, taken = 0, 0
    for first in range(0, rows, AT_ONCE):
        items, _, _, taken = _rows_at(
            query_start, context_lens, first, rows, taken, room, window, AT_ONCE, TILE_TOKENS, PART_KEYS, WINDOWED
        )
        every += tl.sum(items, 0)
    tile_row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PAD_DIM)
    # Rows are walked forward, as items ascend: the one at hand, where its items begin and end, and what it leaves.
    row, first_item, end_item, taken, wanted = -1, 0, 0, 0, 0
    first_token, count, context = 0, 0, 0
    for item in range(tl.program_id(0), every * KV_HEADS, tl.num_programs(0)):
        kv_head = item % KV_HEADS
        place = item // KV_HEADS
        while place >= end_item:
            row += 1
            taken += wanted
            first_token = tl.load(query_start + row)
            count = tl.load(query_start + row + 1) - first_token
            context = tl.load(context_lens + row)
            parts, wanted = _parts(count, context, window, TILE_TOKENS, PART_KEYS, WINDOWED)
            fits = (wanted > 0) & (taken + wanted <= room)
            first_item = end_item
            end_item += tl.where(fits, parts, tl.cdiv(count, TILE_TOKENS))
        apart = ((wanted > 0) & (taken + wanted <= room)).to(tl.int32)
        inner, cell = place - first_item, taken
        # a row's last tiles, which see most, first
        tile = tl.where(apart > 0, 0, tl.cdiv(count, TILE_TOKENS) - 1 - inner)
        in_row = tile * TILE_TOKENS + tile_row // GROUP
        head = kv_head * GROUP + tile_row % GROUP
        valid = (in_row < count) & (tile_row < TILE_TOKENS * GROUP)
        held = valid[:, None] & (dim < HEAD_DIM)[None, :]
        token = (first_token + in_row).to(tl.int64)
        position = context - count + in_row
        earliest = context - count + tile * TILE_TOKENS
        least = tl.maximum(earliest - window + 1, 0) if WINDOWED else 0
        end = tl.minimum(earliest + TILE_TOKENS, context)
        first_part = least // PART_KEYS + tl.where(apart > 0, inner, 0)
        end_part = tl.where(apart > 0, first_part + 1, tl.cdiv(end, PART_KEYS))
        queries = tl.load(
            query + token[:, None] * query_stride + head[:, None] * query_head_stride + dim[None, :],
            mask=held,
            other=0.0,
        )
        peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        weight = tl.zeros([TILE_ROWS], tl.float32)
        total = tl.zeros([TILE_ROWS, PAD_DIM], tl.float32)
        for part in range(first_part, end_part):
            part_total, part_peak, part_weight = over_keys(
                queries,
                kv + kv_head * head_stride,
                value_offset,
                block_tables + tl.cast(row, tl.int64) * table_stride,
                tl.maximum(part * PART_KEYS, least // TILE_KEYS * TILE_KEYS),
                least,
                tl.minimum((part + 1) * PART_KEYS, end),
                position,
                window,
                scale,
                cap,
                block_stride,
                BLOCK_SIZE,
                HEAD_DIM,
                PAD_DIM,
                TILE_ROWS,
                TILE_KEYS,
                True,
                WINDOWED,
                CAPPED,
                FP8,
                WIDE,
                True,
            )
            total, peak, weight = joined(total, peak, weight, part_total, part_peak, part_weight)
        if apart > 0:
            cells_at = ((cell + inner * count + in_row) * (KV_HEADS * GROUP) + head).to(tl.int64)
            tl.store(partial + cells_at[:, None] * HEAD_DIM + dim[None, :], total, mask=held)
            tl.store(levels + cells_at, peak, mask=valid)
            tl.store(levels + (room * (KV_HEADS * GROUP) + cells_at), weight, mask=valid)
        else:
            average = averaged(total, peak, weight, sinks, head, valid, SINKS)
            out_cell = out + token[:, None] * out_stride + head[:, None] * out_head_stride + dim[None, :]
            tl.store(out_cell, average.to(out.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=_VARYING)
def join_parts(
    query_start,
    context_lens,
    out,
    partial,
    levels,
    sinks,
    rows,
    room,
    window,
    out_stride,
    out_head_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    PART_KEYS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    UNROLLED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join the parts of one query in memory, in order. Grid (rows, queries of a row, tiles of query heads)."""
    row = tl.program_id(0)
    own, taken = row // AT_ONCE * AT_ONCE, 0
    for first in range(0, own, AT_ONCE):
        _, _, _, taken = _rows_at(
            query_start, context_lens, first, rows, taken, room, window, AT_ONCE, TILE_TOKENS, PART_KEYS, WINDOWED
        )
    items, divided, cells, taken = _rows_at(
        query_start, context_lens, own, rows, taken, room, window, AT_ONCE, TILE_TOKENS, PART_KEYS, WINDOWED
    )
    own_row = own + tl.arange(0, AT_ONCE) == row
    parts = tl.sum(tl.where(own_row & divided, items, 0), 0)
    cell = tl.sum(tl.where(own_row, cells, 0), 0)
    first_token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first_token
    in_row = tl.program_id(1)
    if (parts == 0) | (in_row >= count):
        return
    head = tl.program_id(2) * TILE_HEADS + tl.arange(0, TILE_HEADS)
    dim = tl.arange(0, PAD_DIM)
    valid = head < HEADS
    peak = tl.full([TILE_HEADS], float("-inf"), tl.float32)
    weight = tl.zeros([TILE_HEADS], tl.float32)
    total = tl.zeros([TILE_HEADS, PAD_DIM], tl.float32)
    for first in range(0, parts, UNROLLED):
        for ahead in tl.static_range(UNROLLED):  # so that loads need not wait for joins
            part = first + ahead
            cells_at = ((cell + part * count + in_row) * HEADS + head).to(tl.int64)
            known = valid & (part < parts)
            wanted = known[:, None] & (dim < HEAD_DIM)[None, :]
            part_total = tl.load(partial + cells_at[:, None] * HEAD_DIM + dim[None, :], mask=wanted, other=0.0)
            part_peak = tl.load(levels + cells_at, mask=known, other=float("-inf"))
            part_weight = tl.load(levels + (room * HEADS + cells_at), mask=known, other=0.0)
            total, peak, weight = joined(total, peak, weight, part_total, part_peak, part_weight)
    average = averaged(total, peak, weight, sinks, head, valid, SINKS)
    cells_out = out + (first_token + in_row).to(tl.int64) * out_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(cells_out, average.to(out.dtype.element_ty), mask=valid[:, None] & (dim < HEAD_DIM)[None, :])


def attend(
    query: Tensor,
    kv: Tensor,
    layer: int,
    meta: AttentionMeta,
    scaling: tuple[float, float],
    out: Tensor,
    sliding_window: int,
    sinks: Tensor | None,
    *,
    pad_dim: int,
    widen: bool,
    room: int = POSITION_ROOM,
) -> None:
    """Compute all rows of the step, checked by the caller. `scaling`: as `attention.scaling` makes it. `room`: parts of
    queries in memory, without a workspace."""
    cache = kv[:, layer]
    _, _, kv_heads, block_size, _ = cache.shape
    heads, head_dim, rows = query.shape[1], query.shape[2], len(meta.context_lens)
    group = heads // kv_heads
    plan = _planned(group=group, head_dim=head_dim, element_bytes=query.element_size())
    if (workspace := meta.workspace) is not None:
        partial, levels = workspace.partial, workspace.lse
        room = len(levels) // (2 * heads)
    else:
        partial = torch.empty(room * heads * head_dim, dtype=torch.float32, device=kv.device)
        levels = torch.empty(2 * room * heads, dtype=torch.float32, device=kv.device)
    rows_shape = {"PAD_DIM": pad_dim, "TILE_TOKENS": plan.tile_tokens, "PART_KEYS": plan.part_keys}
    shared = {**rows_shape, "AT_ONCE": _ROWS_AT_ONCE, "WINDOWED": sliding_window > 0, "SINKS": sinks is not None}
    numbers = meta.query_start if sinks is None else sinks  # read with SINKS only
    position_rows[(plan.programs * multiprocessors(kv.device),)](
        *meta.tensors(query, cache, out),
        partial,
        levels,
        numbers,
        rows,
        room,
        *scaling,
        sliding_window,
        *meta.strides(query, cache, out),
        GROUP=group,
        KV_HEADS=kv_heads,
        BLOCK_SIZE=block_size,
        HEAD_DIM=head_dim,
        TILE_ROWS=plan.tile_rows,
        TILE_KEYS=plan.tile_keys,
        CAPPED=scaling[1] > 0,
        FP8=is_fp8(kv),
        WIDE=widen,
        num_warps=plan.warps,
        num_stages=plan.stages,
        **shared,
    )
    longest = meta.max_context_len or meta.block_tables.shape[1] * meta.block_size
    if longest <= plan.part_keys:
        return
    tile_heads = min(power_of_two_from(heads), max(1, _HEAD_ELEMENTS // pad_dim))
    join_parts[(rows, min(plan.tile_tokens, meta.max_query_len), -(-heads // tile_heads))](
        meta.query_start,
        meta.context_lens,
        out,
        partial,
        levels,
        numbers,
        rows,
        room,
        sliding_window,
        *out.stride()[:2],
        HEADS=heads,
        HEAD_DIM=head_dim,
        TILE_HEADS=tile_heads,
        UNROLLED=_UNROLLED,
        num_warps=4,
        **shared,
    )
