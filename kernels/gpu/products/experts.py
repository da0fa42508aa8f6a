"""A mixture of experts on a GPU: rows sorted by expert on the device, two grouped products, one weighted sum.

Over codes, and where the activation is clamped, the activation is a launch of its own.

Called by `kernels.experts`. Nothing waits for the device: the number of an expert's rows never leaves it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import knobs

from cohort.kernels.code_dtypes import as_bytes, inputs_of
from cohort.kernels.gpu.elementwise import clamped_swiglu, silu_mul
from cohort.kernels.gpu.plan import ExpertPlan, expert_plan, power_of_two_from
from cohort.kernels.gpu.products.coded import CODE_KINDS, plan_of
from cohort.kernels.gpu.products.experts_kernels import (
    add_weighted_rows,
    coded_expert_rows,
    expert_rows,
    gated_expert_rows,
)
from cohort.kernels.types import ClampedSwiglu, ExpertCodes, takes

_WIDEN_PRODUCTS = bool(knobs.runtime.interpret)  # as `attention.WIDEN_PRODUCTS`
_SUM_TILE = 1024


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
    """As `kernels.experts.expert_outputs`."""
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
    """[T · k, outputs] of sorted rows, each over its expert's weight [outputs, inputs], and bias [experts, outputs]:
    with `per_token` of the tokens x [T, inputs], in sorted order; else of sorted rows x [T · k, inputs], token by
    token. `fixed`: with the same tiles for any number of rows."""
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
    """`shape`: of the bias, where there is one."""
    if x.stride(1) != 1 or not all(each.is_contiguous() for each in weights):
        raise ValueError("codes, scales and weights must be dense, and so a row of x")
    if bias is not None and (bias.shape != shape or not bias.is_contiguous()):
        raise ValueError(f"bias {list(bias.shape)} for {list(shape)} outputs of experts")


def _grid(plan: ExpertPlan, rows: int, experts: int, outputs: int) -> tuple[int, int]:
    """Of the most tiles that there may be."""
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
    """Rows (token · k + place) by expert, int64 [T · k]; where each expert's begin and the last one's end, int32
    [experts + 1]."""
    by_expert, order = torch.sort(chosen.reshape(-1), stable=True)
    bounds = torch.arange(experts + 1, dtype=by_expert.dtype, device=chosen.device)
    return order, torch.searchsorted(by_expert, bounds, out_int32=True)


def grouped_products(
    x: Tensor, order: Tensor, starts: Tensor, gate_up: Tensor, down: Tensor, *, per_token: int, fixed: bool = False
) -> Tensor:
    """[T · k, hidden], token by token, of sorted rows."""
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
    """As `kernels.experts.add_weighted`."""
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
