# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""Products over plain weights on a GPU that give a row the same bits beside any other rows (ADR 14).

Called by the engine's linear layers where `engine.batch_invariant` is set; cuBLAS, which computes them otherwise,
chooses a kernel by the number of rows. Here a weight has one shape of tile, whatever the number of rows, so every row
is computed by the same instructions. Its inputs fall into PARTS by the weight's shape alone; each is summed up from
nothing, and the parts are added in order. Whether one program adds them or `add_parts` does may follow the number of
rows: an addition is an addition.
"""

from functools import lru_cache

import torch
import triton  # reads annotations: they are not to be postponed here
import triton.language as tl
from torch import Tensor
from triton import knobs

from cohort.kernels.gpu.attention.attention_tiles import product
from cohort.kernels.gpu.plan import fixed_plan, power_of_two_from

_WIDEN_PRODUCTS = bool(knobs.runtime.interpret)  # as `attention.WIDEN_PRODUCTS`
_ALIGNED_BYTES = 16
_SUM_TILE = 1024
_planned = lru_cache(fixed_plan)


@triton.jit
def _finish(total, cell, bias, column, valid, wanted, BIAS: tl.constexpr, ADD: tl.constexpr):
    """Store sums with bias, or added to what is there, rounded once. `bias` of columns goes to all rows."""
    if BIAS:
        total += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(cell, mask=valid, other=0.0).to(tl.float32)
    tl.store(cell, total.to(cell.dtype.element_ty), mask=valid)


@triton.jit(do_not_specialize=["rows", "run"])
def product_rows(
    x,
    weight,
    bias,
    out,
    partial,
    rows,
    run,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    PART_DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Compute out [rows, OUTPUTS] = x [rows, INPUTS] · weight [OUTPUTS, INPUTS]ᵀ + bias; with ADD out is added to.

    A program adds `run` parts. If that is not all of them, they go to `partial` [PARTS / run, rows, OUTPUTS]. Grid
    (tiles of rows, tiles of OUTPUTS, PARTS / run).
    """
    row = tl.program_id(0) * TILE_ROWS + tl.arange(0, TILE_ROWS)
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    held, wanted = row < rows, column < OUTPUTS
    row = row.to(tl.int64)
    tokens = x + row[:, None] * INPUTS
    matrix = weight + column[None, :].to(tl.int64) * INPUTS
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    first = tl.program_id(2) * run
    for part in range(first, first + run):
        begin = part * PART_DEPTH
        sums = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
        for deep in range(begin, tl.minimum(begin + PART_DEPTH, INPUTS), TILE_DEPTH):
            at = deep + tl.arange(0, TILE_DEPTH)
            inside = at < INPUTS
            own = tl.load(tokens + at[None, :], mask=held[:, None] & inside[None, :], other=0.0)
            factor = tl.load(matrix + at[:, None], mask=inside[:, None] & wanted[None, :], other=0.0)
            sums = product(own, factor, sums, WIDE)
        total += sums
    valid = held[:, None] & wanted[None, :]
    cell = row[:, None] * OUTPUTS + column[None, :]
    if run < PARTS:
        begin_of_run = tl.program_id(2).to(tl.int64) * rows * OUTPUTS
        tl.store(partial + (begin_of_run + cell), total, mask=valid)
    else:
        _finish(total, out + cell, bias, column[None, :], valid, wanted[None, :], BIAS, ADD)


@triton.jit(do_not_specialize=["rows"])
def add_parts(
    partial,
    bias,
    out,
    rows,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Add the parts of `product_rows` in order. Grid (rows, tiles of OUTPUTS)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wanted = column < OUTPUTS
    total = tl.zeros([TILE], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(partial + (part * rows + row) * OUTPUTS + column, mask=wanted, other=0.0)
    _finish(total, out + row * OUTPUTS + column, bias, column, wanted, wanted, BIAS, ADD)


def fixed_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, add: bool = False) -> None:
    """Compute out [T, outputs] = x [T, inputs] · weightᵀ + bias, or with `add` out += the product; rounded once. `out`
    may be float32 for a weight in 16 bits. A row of `out` follows its row of x alone."""
    outputs, inputs = weight.shape
    rows = len(x)
    if x.shape != (rows, inputs) or out.shape != (rows, outputs) or x.dtype != weight.dtype:
        raise ValueError(f"x {x.dtype} {list(x.shape)}, out {list(out.shape)} for {weight.dtype} {list(weight.shape)}")
    if not weight.is_contiguous() or not (bias is None or (bias.is_contiguous() and bias.shape == (outputs,))):
        raise ValueError("weight and bias must be dense, and the bias as long as a row of the product")
    if not rows:
        return
    x = _settled(x)
    result = _settled(out)
    plan = _planned(outputs=outputs, inputs=inputs, element_bytes=x.element_size())
    # One program for all parts of a tile saves a pass over memory; few tiles want more programs.
    run = 1 if rows <= plan.tile_rows else plan.parts
    divided = run < plan.parts
    # Of one type always: a pointer of another would be another variant of the kernel.
    partial = x.new_empty((plan.parts, rows, outputs) if divided else 4, dtype=torch.float32)
    product_rows[(-(-rows // plan.tile_rows), -(-outputs // plan.tile_columns), plan.parts // run)](
        x,
        weight,
        weight if bias is None else bias,  # read with BIAS only
        result,
        partial,
        rows,
        run,
        OUTPUTS=outputs,
        INPUTS=inputs,
        PARTS=plan.parts,
        PART_DEPTH=plan.part_depth,
        BIAS=bias is not None,
        ADD=add,
        TILE_ROWS=plan.tile_rows,
        TILE_COLUMNS=plan.tile_columns,
        TILE_DEPTH=plan.tile_depth,
        WIDE=_WIDEN_PRODUCTS,
        num_warps=plan.warps,
        num_stages=plan.stages,
    )
    if divided:
        tile = min(_SUM_TILE, power_of_two_from(outputs))
        add_parts[(rows, -(-outputs // tile))](
            partial,
            weight if bias is None else bias,
            result,
            rows,
            OUTPUTS=outputs,
            PARTS=plan.parts,
            BIAS=bias is not None,
            ADD=add,
            TILE=tile,
            num_warps=4,
        )
    if result is not out:
        out.copy_(result)


def _settled(tensor: Tensor) -> Tensor:
    """Return the tensor, or an aligned copy: Triton compiles another variant for one that is not."""
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNED_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
