# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""A matrix product in Triton that gives a row the same bits beside any other rows (ADR 14).

Launched by `fixed_products`. A weight has one shape of tile, whatever the number of rows, so every row is computed by
the same instructions. Its inputs fall into PARTS by the weight's shape alone; each is summed up from nothing, and the
parts are added in order. Whether one program adds them or `add_parts` does may follow the number of rows: an addition
is an addition.

Triton reads annotations, so this file must not postpone them.
"""

import triton
import triton.language as tl

from cohort.kernels.gpu.attention.attention_tiles import product


@triton.jit
def _finish(total, cell, bias, column, kept, wanted, BIAS: tl.constexpr, ADD: tl.constexpr):
    """Sums with bias, or beside what is there, rounded once. `bias` of columns goes to all rows."""
    if BIAS:
        total += tl.load(bias + column, mask=wanted, other=0.0).to(tl.float32)
    if ADD:
        total += tl.load(cell, mask=kept, other=0.0).to(tl.float32)
    tl.store(cell, total.to(cell.dtype.element_ty), mask=kept)


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
    """out [rows, OUTPUTS] = x [rows, INPUTS] · weight [OUTPUTS, INPUTS]ᵀ + bias; with ADD beside what is there.

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
    kept = held[:, None] & wanted[None, :]
    cell = row[:, None] * OUTPUTS + column[None, :]
    if run < PARTS:
        begin_of_run = tl.program_id(2).to(tl.int64) * rows * OUTPUTS
        tl.store(partial + (begin_of_run + cell), total, mask=kept)
    else:
        _finish(total, out + cell, bias, column[None, :], kept, wanted[None, :], BIAS, ADD)


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
    """The parts of `product_rows`, added in order. Grid (rows, tiles of OUTPUTS)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    wanted = column < OUTPUTS
    total = tl.zeros([TILE], tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(partial + (part * rows + row) * OUTPUTS + column, mask=wanted, other=0.0)
    _finish(total, out + row * OUTPUTS + column, bias, column, wanted, wanted, BIAS, ADD)
