"""A mixture of experts on a GPU: rows sorted by expert on the device, two grouped products, one weighted sum.

Called by `kernels.experts`. Nothing waits for the device: the number of an expert's rows never leaves it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

from cohort.kernels.gpu.experts_kernels import add_weighted_rows, expert_rows, gated_expert_rows
from cohort.kernels.gpu.plan import expert_plan, power_of_two_from

_WIDEN_PRODUCTS = bool(knobs.runtime.interpret)  # as `attention.WIDEN_PRODUCTS`
_SUM_TILE = 1024


def expert_outputs(x: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """As `kernels.experts.expert_outputs`."""
    order, starts = sorted_rows(chosen, len(gate_up))
    return grouped_products(x, order, starts, gate_up, down, per_token=chosen.shape[1])


def sorted_rows(chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Rows (token · k + place) by expert, int64 [T · k]; where each expert's begin and the last one's end, int32
    [experts + 1]."""
    by_expert, order = torch.sort(chosen.reshape(-1), stable=True)
    bounds = torch.arange(experts + 1, dtype=by_expert.dtype, device=chosen.device)
    return order, torch.searchsorted(by_expert, bounds, out_int32=True)


def grouped_products(
    x: Tensor, order: Tensor, starts: Tensor, gate_up: Tensor, down: Tensor, *, per_token: int
) -> Tensor:
    """[T · k, hidden], token by token, of sorted rows."""
    experts, hidden, inner = down.shape
    rows = len(order)
    if gate_up.shape != (experts, 2 * inner, hidden) or x.shape != (rows // per_token, hidden):
        raise ValueError(f"x {list(x.shape)}, weights {list(gate_up.shape)} and {list(down.shape)} do not fit")
    if x.stride(1) != 1 or not (gate_up.is_contiguous() and down.is_contiguous()):
        raise ValueError("weights must be dense, and so a row of x")
    plan = expert_plan(rows=rows, experts=experts, element_bytes=x.element_size())
    tiles = rows // plan.tile_rows + min(rows, experts)
    shared = {
        "EXPERTS": experts,
        "PAD_EXPERTS": power_of_two_from(experts),
        "HIDDEN": hidden,
        "INNER": inner,
        "TILE_ROWS": plan.tile_rows,
        "TILE_COLUMNS": plan.tile_columns,
        "TILE_DEPTH": plan.tile_depth,
        "WIDE": _WIDEN_PRODUCTS,
        "num_warps": plan.warps,
        "num_stages": plan.stages,
    }
    activated = x.new_empty((rows, inner))
    gated_expert_rows[(tiles, -(-inner // plan.tile_columns))](
        x, order, starts, gate_up, activated, x.stride(0), activated.stride(0), PER_TOKEN=per_token, **shared
    )
    out = x.new_empty((rows, hidden))
    expert_rows[(tiles, -(-hidden // plan.tile_columns))](
        activated, order, starts, down, out, activated.stride(0), out.stride(0), **shared
    )
    return out


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
