# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""Attention over the paged cache in Triton: walk keys, cut contexts into parts, merge the parts, gather for others.

Launched by `attention` and `prefill`. They compute `reference.paged_attention`; where a token lies is R7, R13:
position j of a context is in block j // BLOCK_SIZE of the row's table, in slot j % BLOCK_SIZE counted from the left,
or, where the table holds ~block (a number below zero), from the right. So a direction costs no load of its own, and
rows of both kinds take the same code.

A program serves the query heads of one kv head together (the rows of a tile are tokens × heads), so every key is read
once. Scores are in units of log2, which is what `exp2` wants: `scale` and `cap` come as `attention.scaling`
makes them.

A cache in FP8 (FP8, `fp8_cache`) has a head's codes of a block, then their scales. Codes become numbers of the query's
type; a key's scale, a power of two, multiplies its scores, a value's scale its weights.
"""

import triton  # reads annotations: they are not to be postponed here
import triton.language as tl

from cohort.kernels.gpu.attention.attention_tiles import keys_share, number_of, over_keys, scales_at

# Of these Triton compiles no variant for a 1 or a multiple of 16: they differ from step to step, and a variant that a
# step is the first to meet would be compiled while every row of the worker waits.
_VARYING = [
    *("first_row", "rows", "window", "items", "table_stride"),
    *("query_start", "context_lens", "block_tables", "starts", "sinks"),
]


@triton.jit
def _parts(
    query_start,
    context_lens,
    first_row,
    rows,
    window,
    items,
    KV_HEADS: tl.constexpr,
    PAD_ROWS: tl.constexpr,
    MIN_PART_KEYS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    """Count each row's parts, int32 [PAD_ROWS]: none without a query, one without keys. The same in all programs."""
    row = tl.arange(0, PAD_ROWS)
    valid = row < rows
    start = tl.load(query_start + first_row + row, mask=valid, other=0)
    asks = tl.load(query_start + first_row + row + 1, mask=valid, other=0) > start
    length = tl.load(context_lens + first_row + row, mask=valid, other=0)
    if WINDOWED:
        length = tl.minimum(length, window)
    length = tl.where(asks, length, 0)
    all_keys = tl.sum(length.to(tl.int64), 0) * KV_HEADS
    longest = tl.maximum(tl.cdiv(tl.cdiv(all_keys, items), TILE_KEYS) * TILE_KEYS, MIN_PART_KEYS).to(tl.int32)
    return tl.where(asks, tl.maximum(tl.cdiv(length, longest), 1), 0)


@triton.jit(do_not_specialize=_VARYING)
def decode_rows(
    query,
    kv,
    query_start,
    context_lens,
    block_tables,
    out,
    partial,
    lse,
    sinks,
    first_row,
    rows,
    items,
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
    PAD_ROWS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MIN_PART_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute items in turn: one part of one row's keys, for the query heads of one kv head. Grid (any number of
    programs).

    A row of one part goes to `out`. Of others each part's average and its log2-sum-exp2 go to `partial` and `lse`,
    [parts of all rows, query heads(, HEAD_DIM)]. A row without keys (a captured graph's padding) gives zeros.
    """
    parts = _parts(
        query_start,
        context_lens,
        first_row,
        rows,
        window,
        items,
        KV_HEADS,
        PAD_ROWS,
        MIN_PART_KEYS,
        TILE_KEYS,
        WINDOWED,
    )
    end_part = tl.cumsum(parts, 0)
    member = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PAD_DIM)
    held = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    for item in range(tl.program_id(0), tl.sum(parts, 0) * KV_HEADS, tl.num_programs(0)):
        kv_head = item % KV_HEADS
        place = item // KV_HEADS
        done = end_part <= place  # rows all of whose parts come before this one
        row = tl.sum(done.to(tl.int32), 0)
        own_parts = tl.sum(tl.where(tl.arange(0, PAD_ROWS) == row, parts, 0), 0)
        part = place - tl.max(tl.where(done, end_part, 0), 0)
        token = tl.load(query_start + first_row + row).to(tl.int64)
        context = tl.load(context_lens + first_row + row)
        length = tl.minimum(context, window) if WINDOWED else context
        part_keys = tl.cdiv(tl.cdiv(length, own_parts), TILE_KEYS) * TILE_KEYS
        begin = context - length + part * part_keys
        head = kv_head * GROUP + member
        table = (first_row + row).to(tl.int64) * table_stride
        query_cell = query + token * query_stride + head[:, None] * query_head_stride + dim[None, :]
        total, peak, weight = over_keys(
            tl.load(query_cell, mask=held, other=0.0),
            kv + kv_head * head_stride,
            value_offset,
            block_tables + table,
            begin,
            begin,
            tl.minimum(begin + part_keys, context),
            member,
            window,
            scale,
            cap,
            block_stride,
            BLOCK_SIZE,
            HEAD_DIM,
            PAD_DIM,
            TILE_ROWS,
            TILE_KEYS,
            False,
            WINDOWED,
            CAPPED,
            FP8,
            WIDE,
            False,
        )
        some = tl.where(weight > 0, weight, 1.0)
        average = total / some[:, None]
        if own_parts == 1:
            out_cell = out + token * out_stride + head[:, None] * out_head_stride + dim[None, :]
            if SINKS:
                average = average * keys_share(sinks, head, member < GROUP, peak + tl.log2(some))[:, None]
            tl.store(out_cell, average.to(out.dtype.element_ty), mask=held)
        else:
            cell = place.to(tl.int64) * (KV_HEADS * GROUP) + head
            tl.store(partial + cell[:, None] * HEAD_DIM + dim[None, :], average, mask=held)
            tl.store(lse + cell, peak + tl.log2(some), mask=member < GROUP)


@triton.jit(do_not_specialize=_VARYING)
def merge_parts(
    partial,
    lse,
    sinks,
    query_start,
    context_lens,
    out,
    first_row,
    rows,
    items,
    window,
    out_stride,
    out_head_stride,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    PAD_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    MIN_PART_KEYS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
):
    """Join the parts of one row and one kv head's query heads, averaged by their weights. Grid (kv heads, rows)."""
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    parts = _parts(
        query_start,
        context_lens,
        first_row,
        rows,
        window,
        items,
        KV_HEADS,
        PAD_ROWS,
        MIN_PART_KEYS,
        TILE_KEYS,
        WINDOWED,
    )
    own_parts = tl.sum(tl.where(tl.arange(0, PAD_ROWS) == row, parts, 0), 0)
    if own_parts < 2:
        return
    before = tl.sum(tl.where(tl.arange(0, PAD_ROWS) < row, parts, 0), 0)
    token = tl.load(query_start + first_row + row).to(tl.int64)
    dim = tl.arange(0, PAD_DIM)
    for member in range(0, GROUP):
        head = kv_head * GROUP + member
        peak = tl.full([1], float("-inf"), tl.float32)
        weight = tl.zeros([1], tl.float32)
        total = tl.zeros([PAD_DIM], tl.float32)
        for first in range(0, own_parts, AT_ONCE):
            part = first + tl.arange(0, AT_ONCE)
            valid = part < own_parts
            cell = (before + part).to(tl.int64) * (KV_HEADS * GROUP) + head
            level = tl.load(lse + cell, mask=valid, other=float("-inf"))
            average = tl.load(
                partial + cell[:, None] * HEAD_DIM + dim[None, :],
                mask=valid[:, None] & (dim < HEAD_DIM)[None, :],
                other=0.0,
            )
            higher = tl.maximum(peak, tl.max(level, 0))
            fade = tl.exp2(peak - higher)
            share = tl.exp2(level - higher)
            weight = weight * fade + tl.sum(share, 0)
            total = total * fade + tl.sum(average * share[:, None], 0)
            peak = higher
        out_cell = out + token * out_stride + head * out_head_stride + dim
        if SINKS:
            total = total * keys_share(sinks, head + tl.arange(0, 1), True, peak + tl.log2(weight))
        tl.store(out_cell, (total / weight).to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit(do_not_specialize=_VARYING)
def prefill_rows(
    query,
    kv,
    query_start,
    context_lens,
    block_tables,
    out,
    sinks,
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
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attend from TILE_TOKENS tokens of one row to the row's whole past in the cache, for one kv head's query heads.

    Grid (kv heads, rows, tiles of the longest row); a row's last tiles, which see most, start first.
    """
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    tile = tl.num_programs(2) - 1 - tl.program_id(2)
    first_token = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - first_token
    if tile * TILE_TOKENS >= count:
        return
    context = tl.load(context_lens + row)
    tile_row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PAD_DIM)
    in_row = tile * TILE_TOKENS + tile_row // GROUP
    head = kv_head * GROUP + tile_row % GROUP
    held = (in_row < count) & (tile_row < TILE_TOKENS * GROUP)
    held = held[:, None] & (dim < HEAD_DIM)[None, :]
    token = (first_token + in_row).to(tl.int64)
    before = context - count + tile * TILE_TOKENS  # position of the tile's first token
    begin = tl.maximum(before - window + 1, 0) if WINDOWED else 0
    total, peak, weight = over_keys(
        tl.load(
            query + token[:, None] * query_stride + head[:, None] * query_head_stride + dim[None, :],
            mask=held,
            other=0.0,
        ),
        kv + kv_head * head_stride,
        value_offset,
        block_tables + row.to(tl.int64) * table_stride,
        begin,
        begin,
        tl.minimum(before + TILE_TOKENS, context),
        context - count + in_row,
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
        False,
    )
    some = tl.where(weight > 0, weight, 1.0)
    average = total / some[:, None]
    if SINKS:
        average = average * keys_share(sinks, head, tile_row < TILE_TOKENS * GROUP, peak + tl.log2(some))[:, None]
    out_cell = out + token[:, None] * out_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(out_cell, average.to(out.dtype.element_ty), mask=held)


@triton.jit
def _stage_numbers(codes, scales, to, valid, wanted, kind: tl.constexpr):
    """Copy rows of FP8 as the numbers that they stand for, which 16 bits with float32's exponents hold."""
    scale = scales_at(scales, valid)
    numbers = number_of(tl.load(codes, mask=wanted, other=0), tl.float32) * scale[:, None]
    tl.store(to, numbers.to(kind), mask=wanted)


@triton.jit(do_not_specialize=_VARYING)
def stage_rows(
    kv,
    context_lens,
    block_tables,
    keys,
    values,
    starts,
    table_stride,
    block_stride,
    value_offset,
    head_stride,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    PAD_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    FP8: tl.constexpr,
):
    """Gather every row's keys and values, one row after the other: [positions, KV_HEADS, HEAD_DIM], of FP8 the numbers;
    `starts`, where each row begins and the last ends. Grid (kv heads, rows, tiles of the longest context)."""
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    tile = tl.program_id(2)
    other_row = tl.arange(0, PAD_ROWS)
    start = tl.sum(tl.load(context_lens + other_row, mask=other_row < row, other=0), 0)
    context = tl.load(context_lens + row)
    if (kv_head == 0) & (tile == 0):
        tl.store(starts + row + 1, start + context)
        if row == 0:
            tl.store(starts, 0)
    position = tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
    valid = position < context
    index = position // BLOCK_SIZE
    slot = position % BLOCK_SIZE
    table = row.to(tl.int64) * table_stride
    block = tl.load(block_tables + table + index, mask=valid, other=0)
    slot = tl.where(block < 0, BLOCK_SIZE - 1 - slot, slot)
    block = (block ^ (block >> 31)).to(tl.int64)
    dim = tl.arange(0, PAD_DIM)
    wanted = valid[:, None] & (dim < HEAD_DIM)[None, :]
    cell = kv + kv_head * head_stride + (block * block_stride + slot * HEAD_DIM)[:, None] + dim[None, :]
    staged = (((start + position).to(tl.int64) * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dim[None, :]
    if FP8:
        kind = keys.dtype.element_ty
        scales = kv + kv_head * head_stride + block * block_stride + BLOCK_SIZE * HEAD_DIM + slot * 4
        _stage_numbers(cell, scales, keys + staged, valid, wanted, kind)
        _stage_numbers(cell + value_offset, scales + value_offset, values + staged, valid, wanted, kind)
    else:
        tl.store(keys + staged, tl.load(cell, mask=wanted, other=0.0), mask=wanted)
        tl.store(values + staged, tl.load(cell + value_offset, mask=wanted, other=0.0), mask=wanted)
