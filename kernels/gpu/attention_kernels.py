# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""Attention over the paged cache in Triton: walk keys, cut a row's context into parts, merge the parts.

Launched by `attention` and `prefill`. What they compute is `reference.paged_attention`; where a token lies is R7, R13:
position j of a context is in block j // BLOCK_SIZE of the row's table, in slot j % BLOCK_SIZE counted from the left, or
from the right where the block's direction is 1.

A program serves the query heads of one kv head together (the rows of a tile are tokens × heads), so every key is read
once. Scores are in units of log2, which is what `exp2` wants: `scale` comes multiplied by log2(e).

Triton reads annotations, so this file must not postpone them.
"""

import triton
import triton.language as tl
from triton import knobs

# The interpreter keeps bfloat16 as bit patterns, which its matrix product takes for integers.
WIDEN_PRODUCTS = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def _product(a, b, total, WIDE: tl.constexpr):
    """total + a · b, rounded only where a and b already were."""
    if WIDE:
        return total + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _over_keys(
    query, keys, value_offset, block_table, directions, begin, end, position, window, scale, block_stride,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_DIM: tl.constexpr, TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr, DIRECTED: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Softmax-weighted values of keys [begin, end): the sum [TILE_ROWS, PAD_DIM], its peak score and its weight."""
    dim = tl.arange(0, PAD_DIM)
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([TILE_ROWS], tl.float32)
    total = tl.zeros([TILE_ROWS, PAD_DIM], tl.float32)
    for first in range(begin, end, TILE_KEYS):
        key_position = first + tl.arange(0, TILE_KEYS)
        there = key_position < end
        index = key_position // BLOCK_SIZE
        slot = key_position % BLOCK_SIZE
        block = tl.load(block_table + index, mask=there, other=0).to(tl.int64)
        if DIRECTED:
            reverse = tl.load(directions + index, mask=there, other=0)
            slot = tl.where(reverse != 0, BLOCK_SIZE - 1 - slot, slot)
        cell = keys + (block * block_stride + slot * HEAD_DIM)[:, None] + dim[None, :]
        wanted = there[:, None]
        if PAD_DIM != HEAD_DIM:
            wanted = wanted & (dim < HEAD_DIM)[None, :]
        key = tl.load(cell, mask=wanted, other=0.0)
        nothing = tl.zeros([TILE_ROWS, TILE_KEYS], tl.float32)
        score = _product(query, tl.trans(key), nothing, WIDE) * scale
        visible = there[None, :]
        if CAUSAL:
            visible = visible & (key_position[None, :] <= position[:, None])
            if WINDOWED:
                visible = visible & (key_position[None, :] > position[:, None] - window)
        score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        # a tile row that has seen no key yet: -inf less -inf is no number
        above = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(score - above[:, None])
        fade = tl.exp2(peak - above)
        weight = weight * fade + tl.sum(share, 1)
        value = tl.load(cell + value_offset, mask=wanted, other=0.0)
        total = _product(share.to(value.dtype), value, total * fade[:, None], WIDE)
        peak = higher
    return total, peak, weight


@triton.jit
def _part_of(length, SPLITS: tl.constexpr, MIN_SPLIT_KEYS: tl.constexpr, TILE_KEYS: tl.constexpr):
    """How many keys one part of `length` has; both the programs that walk and the one that merges ask."""
    parts = tl.minimum(tl.maximum(tl.cdiv(length, MIN_SPLIT_KEYS), 1), SPLITS)
    return tl.maximum(tl.cdiv(tl.cdiv(length, parts), TILE_KEYS), 1) * TILE_KEYS


@triton.jit(do_not_specialize=["first_row", "window"])
def decode_rows(
    query, kv, query_start, context_lens, block_tables, directions, out, partial, lse,
    first_row, scale, window, query_stride, query_head_stride, out_stride, out_head_stride, table_stride, block_stride,
    value_offset, head_stride,
    GROUP: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr, TILE_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, SPLITS: tl.constexpr,
    MIN_SPLIT_KEYS: tl.constexpr, DIRECTED: tl.constexpr, WINDOWED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One part of one row's context, for the query heads of one kv head. Grid (kv heads, rows, SPLITS).

    With one split the answer goes to `out`; else the part's average and its log2-sum-exp2 to `partial` and `lse`,
    [rows, query heads, SPLITS(, HEAD_DIM)]. A row without keys (a captured graph's padding) gives zeros.
    """
    kv_head = tl.program_id(0)
    row = tl.program_id(1)
    split = tl.program_id(2)
    token = tl.load(query_start + first_row + row)
    if tl.load(query_start + first_row + row + 1) == token:
        return
    context = tl.load(context_lens + first_row + row)
    oldest = tl.maximum(context - window, 0) if WINDOWED else 0
    part = _part_of(context - oldest, SPLITS, MIN_SPLIT_KEYS, TILE_KEYS)
    begin = oldest + split * part
    if (split > 0) & (begin >= context):
        return

    member = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, PAD_DIM)
    head = kv_head * GROUP + member
    held = (member < GROUP)[:, None] & (dim < HEAD_DIM)[None, :]
    query_cell = query + token.to(tl.int64) * query_stride + head[:, None] * query_head_stride + dim[None, :]
    total, peak, weight = _over_keys(
        tl.load(query_cell, mask=held, other=0.0), kv + kv_head * head_stride, value_offset,
        block_tables + (first_row + row).to(tl.int64) * table_stride,
        directions + (first_row + row).to(tl.int64) * table_stride,
        begin, tl.minimum(begin + part, context), member, window, scale, block_stride,
        BLOCK_SIZE, HEAD_DIM, PAD_DIM, TILE_ROWS, TILE_KEYS, DIRECTED, False, WINDOWED, WIDE,
    )  # fmt: skip
    average = total / tl.where(weight > 0, weight, 1.0)[:, None]
    if SPLITS == 1:
        out_cell = out + token.to(tl.int64) * out_stride + head[:, None] * out_head_stride + dim[None, :]
        tl.store(out_cell, average.to(out.dtype.element_ty), mask=held)
    else:
        place = (row.to(tl.int64) * (KV_HEADS * GROUP) + head) * SPLITS + split
        tl.store(partial + place[:, None] * HEAD_DIM + dim[None, :], average, mask=held)
        level = tl.where(weight > 0, peak + tl.log2(tl.where(weight > 0, weight, 1.0)), float("-inf"))
        tl.store(lse + place, level, mask=member < GROUP)


@triton.jit(do_not_specialize=["first_row", "window"])
def merge_parts(
    partial, lse, query_start, context_lens, out, first_row, window, out_stride, out_head_stride,
    QUERY_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_DIM: tl.constexpr, TILE_KEYS: tl.constexpr,
    SPLITS: tl.constexpr, PAD_SPLITS: tl.constexpr, AT_ONCE: tl.constexpr, MIN_SPLIT_KEYS: tl.constexpr,
    WINDOWED: tl.constexpr,
):  # fmt: skip
    """The parts of one row and head, averaged by their weights. Grid (query heads, rows)."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    token = tl.load(query_start + first_row + row)
    if tl.load(query_start + first_row + row + 1) == token:
        return
    context = tl.load(context_lens + first_row + row)
    length = tl.minimum(context, window) if WINDOWED else context
    parts = tl.cdiv(length, _part_of(length, SPLITS, MIN_SPLIT_KEYS, TILE_KEYS))

    place = (row.to(tl.int64) * QUERY_HEADS + head) * SPLITS
    every = tl.arange(0, PAD_SPLITS)
    level = tl.load(lse + place + every, mask=every < parts, other=float("-inf"))
    peak = tl.max(level, 0)
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weight = tl.sum(tl.exp2(level - peak), 0)
    dim = tl.arange(0, PAD_DIM)
    total = tl.zeros([PAD_DIM], tl.float32)
    for first in range(0, parts, AT_ONCE):
        part = first + tl.arange(0, AT_ONCE)
        there = part < parts
        share = tl.exp2(tl.load(lse + place + part, mask=there, other=float("-inf")) - peak)
        average = tl.load(
            partial + (place + part)[:, None] * HEAD_DIM + dim[None, :],
            mask=there[:, None] & (dim < HEAD_DIM)[None, :], other=0.0,
        )  # fmt: skip
        total += tl.sum(average * share[:, None], 0)
    total = total / tl.where(weight > 0, weight, 1.0)
    out_cell = out + token.to(tl.int64) * out_stride + head * out_head_stride + dim
    tl.store(out_cell, total.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit(do_not_specialize=["window"])
def prefill_rows(
    query, kv, query_start, context_lens, block_tables, directions, out,
    scale, window, query_stride, query_head_stride, out_stride, out_head_stride, table_stride, block_stride,
    value_offset, head_stride,
    GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr, TILE_TOKENS: tl.constexpr, TILE_KEYS: tl.constexpr, DIRECTED: tl.constexpr,
    WINDOWED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """TILE_TOKENS tokens of one row over the row's whole past in the cache, for one kv head's query heads.

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
    total, _, weight = _over_keys(
        tl.load(
            query + token[:, None] * query_stride + head[:, None] * query_head_stride + dim[None, :],
            mask=held, other=0.0,
        ),
        kv + kv_head * head_stride, value_offset,
        block_tables + row.to(tl.int64) * table_stride, directions + row.to(tl.int64) * table_stride,
        tl.maximum(before - window + 1, 0) if WINDOWED else 0, tl.minimum(before + TILE_TOKENS, context),
        context - count + in_row, window, scale, block_stride,
        BLOCK_SIZE, HEAD_DIM, PAD_DIM, TILE_ROWS, TILE_KEYS, DIRECTED, True, WINDOWED, WIDE,
    )  # fmt: skip
    average = total / tl.where(weight > 0, weight, 1.0)[:, None]
    out_cell = out + token[:, None] * out_stride + head[:, None] * out_head_stride + dim[None, :]
    tl.store(out_cell, average.to(out.dtype.element_ty), mask=held)


@triton.jit
def stage_rows(
    kv, context_lens, block_tables, directions, keys, values, starts, table_stride, block_stride, value_offset,
    head_stride,
    KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PAD_DIM: tl.constexpr,
    PAD_ROWS: tl.constexpr, TILE_KEYS: tl.constexpr, DIRECTED: tl.constexpr,
):  # fmt: skip
    """Every row's keys and values, one row after the other: [positions, KV_HEADS, HEAD_DIM]; `starts`, where each row
    begins and the last ends. Grid (kv heads, rows, tiles of the longest context)."""
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
    there = position < context
    index = position // BLOCK_SIZE
    slot = position % BLOCK_SIZE
    table = row.to(tl.int64) * table_stride
    block = tl.load(block_tables + table + index, mask=there, other=0).to(tl.int64)
    if DIRECTED:
        reverse = tl.load(directions + table + index, mask=there, other=0)
        slot = tl.where(reverse != 0, BLOCK_SIZE - 1 - slot, slot)
    dim = tl.arange(0, PAD_DIM)
    wanted = there[:, None] & (dim < HEAD_DIM)[None, :]
    cell = kv + kv_head * head_stride + (block * block_stride + slot * HEAD_DIM)[:, None] + dim[None, :]
    staged = (((start + position).to(tl.int64) * KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(keys + staged, tl.load(cell, mask=wanted, other=0.0), mask=wanted)
    tl.store(values + staged, tl.load(cell + value_offset, mask=wanted, other=0.0), mask=wanted)
