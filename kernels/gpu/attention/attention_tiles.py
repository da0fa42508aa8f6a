# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""What every attention kernel in Triton does with a tile of keys: scores, their softmax, the sum of values.

Called by `attention_kernels` and `positions`. A row that sees none of a tile's keys keeps its sums as they are.
Where FIXED, the code chooses what a compiler may choose otherwise (which product of a sum is rounded): a product that
is added to is one `fma`. That keeps more registers busy, so kernels that need not have it do not.
"""

import triton  # reads annotations: they are not to be postponed here
import triton.language as tl
from triton.language.target_info import cuda_capability_geq


@triton.jit
def product(a, b, total, WIDE: tl.constexpr):
    """Return total + a · b in float32. WIDE: a and b are widened before, see `attention.WIDEN_PRODUCTS`."""
    if WIDE:
        return total + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.constexpr_function
def converts_e4m3():
    """Return whether the device has an instruction for it: from compute capability 8.9 on, and not where kernels are
    interpreted."""
    return cuda_capability_geq(8, 9)


@triton.jit
def number_of(code, kind: tl.constexpr):
    """Return what a byte of E4M3 stands for without its scale, in `kind`, which holds it exactly. NaN is NaN where the
    device converts, else 480: rows of a cache that hold one have a scale that is NaN, and weights hold none."""
    if converts_e4m3():
        return converted_number(code, kind)
    return moved_number(code, kind)


@triton.jit
def converted_number(code, kind: tl.constexpr):
    """Return `number_of` by the device's instruction, two codes at a time; through float16: it makes nothing else."""
    half = code.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if kind == tl.float16:
        return half
    return half.to(tl.float32).to(kind)


@triton.jit
def moved_number(code, kind: tl.constexpr):
    """Return `number_of` by arithmetic: the same digits and exponent at their places in a float16 have exponents that
    count from 8 lower."""
    bits = code.to(tl.uint16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    half *= 256.0
    if kind == tl.float16:
        return half
    return half.to(tl.float32).to(kind)


@triton.jit
def scales_at(at, valid):
    """Load float32 from addresses of bytes."""
    return tl.load(at.to(tl.pointer_type(tl.float32)), mask=valid, other=0.0)


@triton.jit
def over_keys(
    query,
    keys,
    value_offset,
    block_table,
    first_key,
    begin,
    end,
    position,
    window,
    scale,
    cap,
    block_stride,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    FP8: tl.constexpr,
    WIDE: tl.constexpr,
    FIXED: tl.constexpr,
):
    """Sum the softmax-weighted values of keys [begin, end), in tiles from `first_key` on: the sum [TILE_ROWS, PAD_DIM],
    its peak score and its weight. Keys after `end` are not read, FIXED none before `begin`; else the two are equal."""
    dim = tl.arange(0, PAD_DIM)
    peak = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([TILE_ROWS], tl.float32)
    total = tl.zeros([TILE_ROWS, PAD_DIM], tl.float32)
    for first in range(first_key, end, TILE_KEYS):
        key_position = first + tl.arange(0, TILE_KEYS)
        valid = key_position < end
        if FIXED:
            valid = valid & (key_position >= begin)
        index = key_position // BLOCK_SIZE
        slot = key_position % BLOCK_SIZE
        block = tl.load(block_table + index, mask=valid, other=0)
        slot = tl.where(block < 0, BLOCK_SIZE - 1 - slot, slot)
        block = (block ^ (block >> 31)).to(tl.int64)
        cell = keys + (block * block_stride + slot * HEAD_DIM)[:, None] + dim[None, :]
        wanted = valid[:, None]
        if PAD_DIM != HEAD_DIM:
            wanted = wanted & (dim < HEAD_DIM)[None, :]
        nothing = tl.zeros([TILE_ROWS, TILE_KEYS], tl.float32)
        if FP8:
            scales = keys + block * block_stride + BLOCK_SIZE * HEAD_DIM + slot * 4
            key = number_of(tl.load(cell, mask=wanted, other=0), query.dtype)
            factor = (scales_at(scales, valid) * scale)[None, :]
        else:
            key = tl.load(cell, mask=wanted, other=0.0)
            factor = scale
        dots = product(query, tl.trans(key), nothing, WIDE)
        score = dots * factor
        if CAPPED:
            score = cap - 2.0 * cap / (1.0 + tl.exp2(score))
        visible = valid[None, :]
        if CAUSAL:
            visible = visible & (key_position[None, :] <= position[:, None])
            if WINDOWED:
                visible = visible & (key_position[None, :] > position[:, None] - window)
        score = tl.where(visible, score, float("-inf"))
        higher = tl.maximum(peak, tl.max(score, 1))
        # a tile row that has seen no key yet: -inf less -inf is no number
        above = tl.where(higher == float("-inf"), 0.0, higher)
        if FIXED and not CAPPED:
            share = tl.where(visible, tl.exp2(tl.fma(dots, factor, -above[:, None])), 0.0)
        else:
            share = tl.exp2(score - above[:, None])
        fade = tl.exp2(peak - above)
        weight = tl.fma(weight, fade, tl.sum(share, 1)) if FIXED else weight * fade + tl.sum(share, 1)
        if FP8:
            value = number_of(tl.load(cell + value_offset, mask=wanted, other=0), query.dtype)
            share *= scales_at(scales + value_offset, valid)[None, :]
        else:
            value = tl.load(cell + value_offset, mask=wanted, other=0.0)
        total = product(share.to(value.dtype), value, total * fade[:, None], WIDE)
        peak = higher
    return total, peak, weight


@triton.jit
def keys_share(sinks, head, valid, level):
    """Return the share of the weight that a head's sink leaves, for a sum of weights of 2^level: 1 / (1 + 2^(sink -
    level)). A context in parts asks once, after its parts are joined."""
    sink = tl.load(sinks + head, mask=valid, other=0.0) * 1.4426950408889634
    return 1.0 / (1.0 + tl.exp2(sink - tl.maximum(level, -1e30)))  # no keys at all: -inf less -inf is no number


@triton.jit
def joined(total, peak, weight, next_total, next_peak, next_weight):
    """Join sums over keys with those over the keys after them. Nothing (zeros, -inf) on either side leaves them as they
    are: a part that a row sees nothing of may be joined or left out."""
    higher = tl.maximum(peak, next_peak)
    above = tl.where(higher == float("-inf"), 0.0, higher)
    fade, next_fade = tl.exp2(peak - above), tl.exp2(next_peak - above)
    total = tl.fma(total, fade[:, None], next_total * next_fade[:, None])
    return total, higher, tl.fma(weight, fade, next_weight * next_fade)


@triton.jit
def averaged(total, peak, weight, sinks, head, valid, SINKS: tl.constexpr):
    """Return the average of joined sums: zeros without keys, and no negative zero, as parts may be left out."""
    some = tl.where(weight > 0, weight, 1.0)
    share = tl.div_rn(1.0, some)
    if SINKS:  # as `keys_share`
        level = tl.maximum(peak + tl.log2(some), -1e30)
        beyond = tl.fma(tl.load(sinks + head, mask=valid, other=0.0), 1.4426950408889634, -level)
        share *= tl.div_rn(1.0, 1.0 + tl.exp2(beyond))
    average = total * share[:, None]
    return tl.where(average == 0.0, 0.0, average)
