# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, misc, no-any-return"
"""A mixture of experts on a GPU: rows sorted by expert on the device, two grouped products, one weighted sum.

Over codes, and where the activation is clamped, the activation is a launch of its own. Called by `ops.experts`. Nothing
waits for the device, which alone knows how many rows each expert has: the grid is made for the most tiles there may be;
every program finds its tile's expert by the running sum of all experts' tiles, and those after the last end at once. A
captured graph therefore serves whatever its rows are routed to.
"""

from typing import Any

import torch
import triton  # reads annotations: they are not to be postponed here
import triton.language as tl
from torch import Tensor
from triton import knobs

from cohort.kernels.code_dtypes import as_bytes, inputs_of
from cohort.kernels.gpu.attention.attention_tiles import product
from cohort.kernels.gpu.elementwise import clamped_swiglu, silu_mul
from cohort.kernels.gpu.plan import ExpertPlan, expert_plan, power_of_two_from
from cohort.kernels.gpu.products.coded import CODE_KINDS, coded_sums, plan_of
from cohort.kernels.types import ClampedSwiglu, ExpertCodes, takes

_WIDEN_PRODUCTS = bool(knobs.runtime.interpret)  # as `attention.WIDEN_PRODUCTS`
_SUM_TILE = 1024

# Of these Triton compiles no variant for a 1 or a multiple of 16, as in `attention_kernels`.
_VARYING = ["order", "starts", "per_token"]


@triton.jit
def _tile(starts, tile, EXPERTS: tl.constexpr, PAD_EXPERTS: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Find a tile's expert (EXPERTS or more: there is no such tile), its first row, and where the expert's rows end.
    Expert e has rows [starts[e], starts[e + 1])."""
    expert = tl.arange(0, PAD_EXPERTS)
    valid = expert < EXPERTS
    begin = tl.load(starts + expert, mask=valid, other=0)
    end = tl.load(starts + expert + 1, mask=valid, other=0)
    end_tile = tl.cumsum(tl.cdiv(end - begin, TILE_ROWS), 0)
    done = end_tile <= tile
    own = tl.sum(done.to(tl.int32), 0)
    before = tl.max(tl.where(done, end_tile, 0), 0)
    first = tl.sum(tl.where(expert == own, begin, 0), 0) + (tile - before) * TILE_ROWS
    return own, first, tl.sum(tl.where(expert == own, end, 0), 0)


@triton.jit
def _places(order, row, held, per_token, FROM_TOKENS: tl.constexpr):
    """Return, of sorted rows, which rows of x they are made of, and where they go."""
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
    """Compute out[r] = silu(gate · x) · (up · x), for sorted row r of the token in `order`; weight [EXPERTS, gates over
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
        gate = product(part, tl.load(gates + at[:, None], mask=wanted, other=0.0), gate, WIDE)
        up = product(part, tl.load(gates + INNER * HIDDEN + at[:, None], mask=wanted, other=0.0), up, WIDE)
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
    """Compute out[r] = weight · x[order[r] / per_token] FROM_TOKENS, else out[order[r]] = weight · x[r], for sorted row
    r; and bias. weight [EXPERTS, OUTPUTS, INPUTS], bias [EXPERTS, OUTPUTS]. Grid (tiles of rows, tiles of OUTPUTS)."""
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
        total = product(part, tl.load(matrix + at[:, None], mask=wanted, other=0.0), total, WIDE)
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
    """Compute `expert_rows` over weights in codes [EXPERTS, OUTPUTS, ...]."""
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
    """Add Σ weights[t, k] · parts[t, k] in ascending k, and shared[t], to residual[t]. Roundings after every operation,
    as in `reference`. Grid (tokens, tiles of the width)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    valid = column < WIDTH
    kind = residual.dtype.element_ty
    total = tl.zeros([TILE], tl.float32)
    for place in range(0, PER_TOKEN):
        weight = tl.load(weights + token * PER_TOKEN + place).to(tl.float32)
        part = tl.load(parts + (token * PER_TOKEN + place) * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
        total = (total + (part * weight).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    if SHARED:
        own = tl.load(shared + token * WIDTH + column, mask=valid, other=0.0).to(tl.float32)
        total = (total + own).to(kind).to(tl.float32)
    cell = residual + token * WIDTH + column
    tl.store(cell, (tl.load(cell, mask=valid, other=0.0).to(tl.float32) + total).to(kind), mask=valid)


def expert_outputs(
    x: Tensor,
    chosen: Tensor,
    gate_up: Tensor | ExpertCodes,
    down: Tensor | ExpertCodes,
    biases: tuple[Tensor, Tensor] | None = None,
    clamped: ClampedSwiglu | None = None,
    *,
    fixed: bool = False,
) -> Tensor:
    count, per_token = len(gate_up if isinstance(gate_up, Tensor) else gate_up.codes), chosen.shape[1]
    order, starts = sorted_rows(chosen, count)
    if isinstance(gate_up, Tensor) != isinstance(down, Tensor):
        raise TypeError("experts are plain or in codes, all their products alike")
    if isinstance(gate_up, Tensor) and isinstance(down, Tensor) and clamped is None and biases is None:
        return grouped_products(x, order, starts, gate_up, down, per_token=per_token, fixed=fixed)
    into, out_of = (None, None) if biases is None else biases
    both = products(x, order, starts, gate_up, into, per_token=per_token, fixed=fixed)
    activated = both.new_empty((len(order), both.shape[1] // 2))
    if clamped is None:
        silu_mul(both, activated)
    else:
        clamped_swiglu(both, clamped.alpha, clamped.limit, activated, in_turn=True)
    del both
    return products(activated, order, starts, down, out_of, fixed=fixed)


def products(
    x: Tensor,
    order: Tensor,
    starts: Tensor,
    weight: Tensor | ExpertCodes,
    bias: Tensor | None = None,
    *,
    per_token: int = 0,
    fixed: bool = False,
) -> Tensor:
    """Return [T · k, outputs] of sorted rows, each over its expert's weight [outputs, inputs], and bias [experts,
    outputs]: with `per_token` of the tokens x [T, inputs], in sorted order; else of sorted rows x [T · k, inputs],
    token by token. `fixed`: with the same tiles for any number of rows."""
    if isinstance(weight, Tensor):
        return _plain_products(x, order, starts, weight, bias, per_token, fixed)
    return _coded_products(x, order, starts, weight, bias, per_token, fixed)


def _plain_products(
    x: Tensor, order: Tensor, starts: Tensor, weight: Tensor, bias: Tensor | None, per_token: int, fixed: bool
) -> Tensor:
    experts, outputs, inputs = weight.shape
    rows = len(order)
    if x.shape != (rows // per_token if per_token else rows, inputs):
        raise ValueError(f"x {list(x.shape)} does not fit weights {list(weight.shape)}")
    _check_dense(x, [weight], bias, (experts, outputs))
    plan = expert_plan(rows=rows, experts=experts, element_bytes=x.element_size(), fixed=fixed)
    out = x.new_empty((rows, outputs))
    expert_rows[_grid(plan, rows, experts, outputs)](
        x,
        order,
        starts,
        weight,
        weight if bias is None else bias,  # read with BIAS only
        out,
        max(1, per_token),
        x.stride(0),
        out.stride(0),
        OUTPUTS=outputs,
        INPUTS=inputs,
        BIAS=bias is not None,
        FROM_TOKENS=per_token > 0,
        WIDE=_WIDEN_PRODUCTS,
        **_tiles(plan, experts),
    )
    return out


def _coded_products(
    x: Tensor, order: Tensor, starts: Tensor, weight: ExpertCodes, bias: Tensor | None, per_token: int, fixed: bool
) -> Tensor:
    codes, scales, offsets, group = weight.codes, weight.scales, weight.offsets, weight.group
    experts, outputs, _ = codes.shape
    inputs, rows = inputs_of(codes), len(order)
    if not takes(codes.dtype, group, inputs):
        raise TypeError(f"codes of {codes.dtype} in groups of {group}")
    groups = -(-inputs // group)
    if x.shape != (rows // per_token if per_token else rows, inputs) or scales.shape != (experts, outputs, groups):
        raise ValueError(f"x {list(x.shape)} and scales {list(scales.shape)} do not fit codes {list(codes.shape)}")
    _check_dense(x, [codes, scales, *(() if offsets is None else (offsets,))], bias, (experts, outputs))
    plan = plan_of(x, 1 if rows <= 16 * experts else 17, codes, group, fixed)
    out = x.new_empty((rows, outputs))
    scales = as_bytes(scales)
    coded_expert_rows[_grid(plan, rows, experts, outputs)](
        x,
        order,
        starts,
        as_bytes(codes),
        scales,
        scales if offsets is None else offsets,  # read with OFFSETS only
        scales if bias is None else bias,
        out,
        max(1, per_token),
        x.stride(0),
        out.stride(0),
        OUTPUTS=outputs,
        INPUTS=inputs,
        GROUP=max(group, inputs) if groups == 1 else group,
        CODE=CODE_KINDS[codes.dtype],
        OFFSETS=offsets is not None,
        BIAS=bias is not None,
        FROM_TOKENS=per_token > 0,
        WIDE=_WIDEN_PRODUCTS or x.dtype == torch.float32,
        **_tiles(plan, experts),
    )
    return out


def _check_dense(x: Tensor, weights: list[Tensor], bias: Tensor | None = None, shape: tuple[int, int] = (0, 0)) -> None:
    """Raise `ValueError` for tensors with gaps, or a bias that is not of `shape`."""
    if x.stride(1) != 1 or not all(each.is_contiguous() for each in weights):
        raise ValueError("codes, scales and weights must be dense, and so a row of x")
    if bias is not None and (bias.shape != shape or not bias.is_contiguous()):
        raise ValueError(f"bias {list(bias.shape)} for {list(shape)} outputs of experts")


def _grid(plan: ExpertPlan, rows: int, experts: int, outputs: int) -> tuple[int, int]:
    """Return a grid for the most tiles that there may be."""
    return rows // plan.tile_rows + min(rows, experts), -(-outputs // plan.tile_columns)


def _tiles(plan: ExpertPlan, experts: int) -> dict[str, Any]:
    return {
        "EXPERTS": experts,
        "PAD_EXPERTS": power_of_two_from(experts),
        "TILE_ROWS": plan.tile_rows,
        "TILE_COLUMNS": plan.tile_columns,
        "TILE_DEPTH": plan.tile_depth,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }


def sorted_rows(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort rows (token · k + place) by expert, int64 [T · k]; return also experts' bounds, int32 [experts + 1]."""
    by_expert, order = torch.sort(chosen.reshape(-1), stable=True)
    bounds = torch.arange(experts + 1, dtype=by_expert.dtype, device=chosen.device)
    return order, torch.searchsorted(by_expert, bounds, out_int32=True)


def grouped_products(
    x: Tensor, order: Tensor, starts: Tensor, gate_up: Tensor, down: Tensor, *, per_token: int, fixed: bool = False
) -> Tensor:
    """Return [T · k, hidden], token by token, of sorted rows."""
    experts, hidden, inner = down.shape
    rows = len(order)
    if gate_up.shape != (experts, 2 * inner, hidden) or x.shape != (rows // per_token, hidden):
        raise ValueError(f"x {list(x.shape)}, weights {list(gate_up.shape)} and {list(down.shape)} do not fit")
    _check_dense(x, [gate_up, down])
    plan = expert_plan(rows=rows, experts=experts, element_bytes=x.element_size(), fixed=fixed)
    activated = x.new_empty((rows, inner))
    gated_expert_rows[_grid(plan, rows, experts, inner)](
        x,
        order,
        starts,
        gate_up,
        activated,
        x.stride(0),
        activated.stride(0),
        PER_TOKEN=per_token,
        HIDDEN=hidden,
        INNER=inner,
        WIDE=_WIDEN_PRODUCTS,
        **_tiles(plan, experts),
    )
    return products(activated, order, starts, down, fixed=fixed)


def add_weighted(parts: Tensor, weights: Tensor, shared: Tensor | None, residual: Tensor) -> None:
    tokens, per_token = weights.shape
    width = residual.shape[1]
    if parts.shape != (tokens * per_token, width) or residual.shape[0] != tokens:
        raise ValueError(f"parts {list(parts.shape)} and weights {list(weights.shape)} for {list(residual.shape)}")
    if not all(each.is_contiguous() for each in (parts, weights, residual, *(() if shared is None else (shared,)))):
        raise ValueError("parts, weights and sums must be dense")
    if tokens == 0:
        return
    tile = min(_SUM_TILE, power_of_two_from(width))
    add_weighted_rows[(tokens, -(-width // tile))](
        parts,
        weights,
        residual if shared is None else shared,  # read with SHARED only
        residual,
        PER_TOKEN=per_token,
        WIDTH=width,
        TILE=tile,
        SHARED=shared is not None,
        num_warps=4,
    )
