# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""Products over weights of 8 and 4 bits on a GPU: codes are read as they are stored and become numbers in the tile.

Called by `ops.coded`, one launch for each part of a weight. The tiles follow from rows, type and group alone, so two
variants of a product serve all steps, and a recorded step keeps its own. A code is a number of few digits, exact in 16
bits, so a tile of them goes to the matrix units as it is; scales and offsets multiply sums in float32, group by group.
Of MXFP4 a scale is a power of two, so numbers are exact in bfloat16 with their scales as well, and a tile may span
groups. x is not rounded.
"""

import torch
import triton  # reads annotations: they are not to be postponed here
import triton.language as tl
from torch import Tensor
from triton import knobs

from cohort.kernels import code_dtypes
from cohort.kernels.code_dtypes import as_bytes, inputs_of
from cohort.kernels.gpu.attention.attention_tiles import number_of, product
from cohort.kernels.gpu.plan import ExpertPlan, coded_plan
from cohort.kernels.types import takes

_WIDEN_PRODUCTS = bool(knobs.runtime.interpret)  # as `attention.WIDEN_PRODUCTS`
CODE_KINDS = {torch.int8: 0, torch.uint8: 1, code_dtypes.E4M3: 2, code_dtypes.E2M1: 3}  # as below

# Of these Triton compiles no variant for a 1 or a multiple of 16, as in `attention_kernels`.
_VARYING = ["rows"]

# Of odd numbers a byte is two inputs.
INT8 = tl.constexpr(0)
UINT4 = tl.constexpr(1)
E4M3 = tl.constexpr(2)
E2M1 = tl.constexpr(3)


@triton.jit
def _number(byte, kind: tl.constexpr, CODE: tl.constexpr):
    """Return what codes of 8 bits stand for, in the type of x."""
    if CODE == E4M3:
        return number_of(byte, kind)
    return byte.to(tl.float32).to(kind)


@triton.jit
def _mx_scale(exponent):
    """Return 2^14 times what exponents of E8M0 stand for; NaN beyond 2^113, where no weight is."""
    wide = exponent.to(tl.int32)
    return tl.where(wide > 240, float("nan"), ((wide + 14) << 23).to(tl.float32, bitcast=True))


@triton.jit
def _mx_number(nibble, scale, kind: tl.constexpr):
    """Return what codes of MXFP4 stand for: the same digits and exponent at their places in a float16, whose exponents
    count from 14 lower, times `_mx_scale`."""
    bits = nibble.to(tl.uint16)
    half = (((bits & 8) << 12) | ((bits & 7) << 9)).to(tl.float16, bitcast=True)
    return (half.to(tl.float32) * scale).to(kind)


@triton.jit
def coded_sums(
    tokens,
    codes,
    scales,
    offsets,
    held,
    column,
    wanted,
    total,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    OFFSETS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Add to `total` [rows, columns] the products of rows that begin at `tokens` [rows, 1] and these columns of a
    weight. GROUP is a multiple of TILE_DEPTH, or at least INPUTS; of E2M1 it is 32, and TILE_DEPTH a multiple of it."""
    kind = tokens.dtype.element_ty
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    for deep in range(0, INPUTS, TILE_DEPTH):
        if CODE % 2:
            # the lower nibble is the even input's, so the even inputs of x meet the lower nibbles
            pair = deep // 2 + tl.arange(0, TILE_DEPTH // 2)
            inside = pair < INPUTS // 2
            valid = held[:, None] & inside[None, :]
            even = tl.load(tokens + 2 * pair[None, :], mask=valid, other=0.0)
            odd = tl.load(tokens + 2 * pair[None, :] + 1, mask=valid, other=0.0)
        if CODE == E2M1:
            group = deep // GROUP + tl.arange(0, TILE_DEPTH // GROUP)
            own_group = group[:, None] * (GROUP // 2) + tl.arange(0, GROUP // 2)[None, :]
            known = (group < GROUPS)[:, None] & wanted[None, :]
            cell = codes + column.to(tl.int64)[None, None, :] * (INPUTS // 2) + own_group[:, :, None]
            byte = tl.load(cell, mask=known[:, None, :], other=0)
            exponent = tl.load(scales + column.to(tl.int64)[None, :] * GROUPS + group[:, None], mask=known, other=0)
            scale = _mx_scale(exponent)[:, None, :]
            low = _mx_number(byte & 15, scale, kind).reshape(TILE_DEPTH // 2, column.shape[0])
            high = _mx_number(byte >> 4, scale, kind).reshape(TILE_DEPTH // 2, column.shape[0])
            total = product(odd, high, product(even, low, total, WIDE), WIDE)
        elif CODE == UINT4:
            cell = codes + column[None, :].to(tl.int64) * (INPUTS // 2) + pair[:, None]
            byte = tl.load(cell, mask=inside[:, None] & wanted[None, :], other=0)
            part = product(even, (byte & 15).to(tl.float32).to(kind), tl.zeros_like(total), WIDE)
            part = product(odd, (byte >> 4).to(tl.float32).to(kind), part, WIDE)
            sums = tl.sum(even.to(tl.float32), 1) + tl.sum(odd.to(tl.float32), 1)
        else:
            at = deep + tl.arange(0, TILE_DEPTH)
            inside = at < INPUTS
            own = tl.load(tokens + at[None, :], mask=held[:, None] & inside[None, :], other=0.0)
            cell = codes + column[None, :].to(tl.int64) * INPUTS + at[:, None]
            byte = tl.load(cell, mask=inside[:, None] & wanted[None, :], other=0)
            part = product(own, _number(byte, kind, CODE), tl.zeros_like(total), WIDE)
            sums = tl.sum(own.to(tl.float32), 1)
        if CODE != E2M1:
            place = column.to(tl.int64) * GROUPS + deep // GROUP
            factor = tl.load(scales + place, mask=wanted, other=0.0)
            total += part * factor[None, :]
            if OFFSETS:
                total += sums[:, None] * tl.load(offsets + place, mask=wanted, other=0.0)[None, :]
    return total


@triton.jit(do_not_specialize=_VARYING)
def coded_rows(
    x,
    codes,
    scales,
    offsets,
    bias,
    out,
    rows,
    x_stride,
    out_stride,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute out[t, o] = Σ x[t, i] · (scales[o, i // GROUP] · number(codes[o, i]) + offsets[o, i // GROUP]) + bias[o].

    With ADD out is added to; rounded once. Grid (tiles of rows, tiles of OUTPUTS). GROUP as in `coded_sums`.
    """
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    held, wanted = row < rows, column < OUTPUTS
    tokens = x + row[:, None].to(tl.int64) * x_stride
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    total = coded_sums(
        tokens, codes, scales, offsets, held, column, wanted, total, INPUTS, GROUP, CODE, OFFSETS, TILE_DEPTH, WIDE
    )
    if BIAS:
        total += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)[None, :]
    cells = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
    valid = held[:, None] & wanted[None, :]
    if ADD:
        total += tl.load(cells, mask=valid, other=0.0).to(tl.float32)
    tl.store(cells, total.to(out.dtype.element_ty), mask=valid)


def coded_product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    offsets: Tensor | None,
    group: int,
    bias: Tensor | None,
    out: Tensor,
    *,
    add: bool = False,
    fixed: bool = False,
) -> None:
    """See `reference.coded_product`. `out` may be a part of wider rows. `fixed`: one plan for any number of rows."""
    outputs, inputs = len(codes), inputs_of(codes)
    rows, groups = len(x), -(-inputs // group)
    if not takes(codes.dtype, group, inputs):
        raise TypeError(f"codes of {codes.dtype} in groups of {group}")
    if x.shape != (rows, inputs) or out.shape != (rows, outputs) or scales.shape != (outputs, groups):
        raise ValueError(
            f"x {list(x.shape)}, out {list(out.shape)}, scales {list(scales.shape)} for {list(codes.shape)}"
        )
    dense = (codes, scales, *(each for each in (offsets, bias) if each is not None))
    if x.stride(1) != 1 or out.stride(1) != 1 or not all(each.is_contiguous() for each in dense):
        raise ValueError("codes, scales and bias must be dense, and so a row of x and of the product")
    if not rows:
        return
    plan = plan_of(x, rows, codes, group, fixed)
    coded_rows[(-(-rows // plan.tile_rows), -(-outputs // plan.tile_columns))](
        x,
        as_bytes(codes),
        as_bytes(scales),
        as_bytes(scales) if offsets is None else offsets,  # read with OFFSETS only
        as_bytes(scales) if bias is None else bias,
        out,
        rows,
        x.stride(0),
        out.stride(0),
        OUTPUTS=outputs,
        INPUTS=inputs,
        GROUP=max(group, inputs) if groups == 1 else group,
        CODE=CODE_KINDS[codes.dtype],
        OFFSETS=offsets is not None,
        BIAS=bias is not None,
        ADD=add,
        TILE_ROWS=plan.tile_rows,
        TILE_COLUMNS=plan.tile_columns,
        TILE_DEPTH=plan.tile_depth,
        WIDE=_WIDEN_PRODUCTS or x.dtype == torch.float32,
        num_warps=plan.warps,
        num_stages=plan.stages,
    )


def plan_of(x: Tensor, rows: int, codes: Tensor, group: int, fixed: bool) -> ExpertPlan:
    """Return the plan of a product of `rows` rows like x's. MXFP4's scales are applied in the tile, across groups."""
    inputs = inputs_of(codes)
    whole = inputs if codes.dtype == code_dtypes.E2M1 else group
    return coded_plan(rows=rows, group=whole, inputs=inputs, element_bytes=x.element_size(), fixed=fixed)
