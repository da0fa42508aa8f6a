# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""Products of a mixture of experts in Triton: rows sorted by expert, tiles that belong to one expert each.

Launched by `experts`. How many rows each expert has is known on the device alone, so the grid is made for the most
tiles there may be; every program finds its tile's expert by the running sum of all experts' tiles, and those beyond the
last end at once. A captured graph therefore serves whatever its rows are routed to.

Triton reads annotations, so this file must not postpone them.
"""

import triton
import triton.language as tl

from cohort.kernels.gpu.products.coded_kernels import coded_sums

# Of these Triton compiles no variant for a 1 or a multiple of 16, as in `attention_kernels`.
_VARYING = ["order", "starts", "per_token"]


@triton.jit
def _product(a, b, total, WIDE: tl.constexpr):
    """total + a · b in float32. WIDE: a and b are widened before, see `attention.WIDEN_PRODUCTS`."""
    if WIDE:
        return total + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _tile(starts, tile, EXPERTS: tl.constexpr, PAD_EXPERTS: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Of the tile of this number: its expert (EXPERTS or more: there is no such tile), its first row, and where the
    expert's rows end. Expert e has rows [starts[e], starts[e + 1])."""
    expert = tl.arange(0, PAD_EXPERTS)
    there = expert < EXPERTS
    begin = tl.load(starts + expert, mask=there, other=0)
    end = tl.load(starts + expert + 1, mask=there, other=0)
    end_tile = tl.cumsum(tl.cdiv(end - begin, TILE_ROWS), 0)
    done = end_tile <= tile
    own = tl.sum(done.to(tl.int32), 0)
    before = tl.max(tl.where(done, end_tile, 0), 0)
    first = tl.sum(tl.where(expert == own, begin, 0), 0) + (tile - before) * TILE_ROWS
    return own, first, tl.sum(tl.where(expert == own, end, 0), 0)


@triton.jit
def _places(order, row, held, per_token, FROM_TOKENS: tl.constexpr):
    """Of sorted rows: which rows of x they are made of, and where they go."""
    place = tl.load(order + row, mask=held, other=0)
    if FROM_TOKENS:
        source, target = place // per_token, row.to(tl.int64)
    else:
        source, target = row.to(tl.int64), place
    return source, target


@triton.jit
def _bias(bias, own, column, OUTPUTS: tl.constexpr):
    cell = bias + own.to(tl.int64) * OUTPUTS + column
    return tl.load(cell, mask=column < OUTPUTS, other=0.0).to(tl.float32)[None, :]


@triton.jit(do_not_specialize=_VARYING)
def gated_expert_rows(
    x,
    order,
    starts,
    weight,
    out,
    x_stride,
    out_stride,
    EXPERTS: tl.constexpr,
    PAD_EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out[r] = silu(gate · x) · (up · x), for sorted row r of the token that `order` says; weight [EXPERTS, gates over
    ups, HIDDEN]. Grid (tiles of rows, tiles of INNER)."""
    own, first, stop = _tile(starts, tl.program_id(0), EXPERTS, PAD_EXPERTS, TILE_ROWS)
    if own >= EXPERTS:
        return
    row = first + tl.arange(0, TILE_ROWS)
    held = row < stop
    token = tl.load(order + row, mask=held, other=0) // PER_TOKEN
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    gates = weight + own.to(tl.int64) * (2 * INNER * HIDDEN) + column[None, :].to(tl.int64) * HIDDEN
    tokens = x + token[:, None] * x_stride
    gate = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    up = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for deep in range(0, HIDDEN, TILE_DEPTH):
        at = deep + tl.arange(0, TILE_DEPTH)
        inside = at < HIDDEN
        part = tl.load(tokens + at[None, :], mask=held[:, None] & inside[None, :], other=0.0)
        wanted = inside[:, None] & (column < INNER)[None, :]
        gate = _product(part, tl.load(gates + at[:, None], mask=wanted, other=0.0), gate, WIDE)
        up = _product(part, tl.load(gates + INNER * HIDDEN + at[:, None], mask=wanted, other=0.0), up, WIDE)
    kind = out.dtype.element_ty
    gate = gate.to(kind).to(tl.float32)
    active = (gate / (1.0 + tl.exp(-gate))).to(kind).to(tl.float32)
    cell = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(cell, (active * up.to(kind).to(tl.float32)).to(kind), mask=held[:, None] & (column < INNER)[None, :])


@triton.jit(do_not_specialize=_VARYING)
def expert_rows(
    x,
    order,
    starts,
    weight,
    bias,
    out,
    per_token,
    x_stride,
    out_stride,
    EXPERTS: tl.constexpr,
    PAD_EXPERTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
    FROM_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """out[r] = weight · x[order[r] / per_token] FROM_TOKENS, else out[order[r]] = weight · x[r], for sorted row r; and
    bias. weight [EXPERTS, OUTPUTS, INPUTS], bias [EXPERTS, OUTPUTS]. Grid (tiles of rows, tiles of OUTPUTS)."""
    own, first, stop = _tile(starts, tl.program_id(0), EXPERTS, PAD_EXPERTS, TILE_ROWS)
    if own >= EXPERTS:
        return
    row = first + tl.arange(0, TILE_ROWS)
    held = row < stop
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    matrix = weight + own.to(tl.int64) * (OUTPUTS * INPUTS) + column[None, :].to(tl.int64) * INPUTS
    source, target = _places(order, row, held, per_token, FROM_TOKENS)
    rows = x + source[:, None] * x_stride
    total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
    for deep in range(0, INPUTS, TILE_DEPTH):
        at = deep + tl.arange(0, TILE_DEPTH)
        inside = at < INPUTS
        part = tl.load(rows + at[None, :], mask=held[:, None] & inside[None, :], other=0.0)
        wanted = inside[:, None] & (column < OUTPUTS)[None, :]
        total = _product(part, tl.load(matrix + at[:, None], mask=wanted, other=0.0), total, WIDE)
    if BIAS:
        total += _bias(bias, own, column, OUTPUTS)
    cell = out + target[:, None] * out_stride + column[None, :]
    tl.store(cell, total.to(out.dtype.element_ty), mask=held[:, None] & (column < OUTPUTS)[None, :])


@triton.jit(do_not_specialize=_VARYING)
def coded_expert_rows(
    x,
    order,
    starts,
    codes,
    scales,
    offsets,
    bias,
    out,
    per_token,
    x_stride,
    out_stride,
    EXPERTS: tl.constexpr,
    PAD_EXPERTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    GROUP: tl.constexpr,
    CODE: tl.constexpr,
    OFFSETS: tl.constexpr,
    BIAS: tl.constexpr,
    FROM_TOKENS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_DEPTH: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Over weights in codes [EXPERTS, OUTPUTS, ...]: out[r] = weight · x[order[r] / per_token] FROM_TOKENS, else
    out[order[r]] = weight · x[r], for sorted row r; and bias [EXPERTS, OUTPUTS]. Grid (tiles of rows, tiles of
    OUTPUTS)."""
    own, first, stop = _tile(starts, tl.program_id(0), EXPERTS, PAD_EXPERTS, TILE_ROWS)
    if own >= EXPERTS:
        return
    GROUPS: tl.constexpr = (INPUTS + GROUP - 1) // GROUP
    STORED: tl.constexpr = INPUTS // 2 if CODE % 2 else INPUTS
    row = first + tl.arange(0, TILE_ROWS)
    held = row < stop
    column = tl.program_id(1) * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
    wanted = column < OUTPUTS
    source, target = _places(order, row, held, per_token, FROM_TOKENS)
    of_expert = own.to(tl.int64) * OUTPUTS
    total = coded_sums(
        x + source[:, None] * x_stride,
        codes + of_expert * STORED,
        scales + of_expert * GROUPS,
        offsets + of_expert * GROUPS,
        held,
        column,
        wanted,
        tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32),
        INPUTS,
        GROUP,
        CODE,
        OFFSETS,
        TILE_DEPTH,
        WIDE,
    )
    if BIAS:
        total += _bias(bias, own, column, OUTPUTS)
    cell = out + target[:, None] * out_stride + column[None, :]
    tl.store(cell, total.to(out.dtype.element_ty), mask=held[:, None] & wanted[None, :])


@triton.jit
def add_weighted_rows(
    parts,
    weights,
    shared,
    residual,
    PER_TOKEN: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    SHARED: tl.constexpr,
):
    """residual[t] += Σ weights[t, k] · parts[t, k] in ascending k, and shared[t]. Roundings after every operation, as
    in `reference`. Grid (tokens, tiles of the width)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there = column < WIDTH
    kind = residual.dtype.element_ty
    total = tl.zeros([TILE], tl.float32)
    for place in range(0, PER_TOKEN):
        weight = tl.load(weights + token * PER_TOKEN + place).to(tl.float32)
        part = tl.load(parts + (token * PER_TOKEN + place) * WIDTH + column, mask=there, other=0.0).to(tl.float32)
        total = (total + (part * weight).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    if SHARED:
        own = tl.load(shared + token * WIDTH + column, mask=there, other=0.0).to(tl.float32)
        total = (total + own).to(kind).to(tl.float32)
    cell = residual + token * WIDTH + column
    tl.store(cell, (tl.load(cell, mask=there, other=0.0).to(tl.float32) + total).to(kind), mask=there)
