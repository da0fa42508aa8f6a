"""Products over weights of 8 and 4 bits on a GPU: one launch for each part of a weight.

Called by `kernels.coded`. The tiles follow from rows, type and group alone, so two variants of a product serve all
steps, and a recorded step keeps its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton import knobs

from cohort.kernels.code_dtypes import E2M1, E4M3, as_bytes, inputs_of
from cohort.kernels.gpu.plan import ExpertPlan, coded_plan
from cohort.kernels.gpu.products.coded_kernels import coded_rows
from cohort.kernels.types import takes

_WIDEN_PRODUCTS = bool(knobs.runtime.interpret)  # as `attention.WIDEN_PRODUCTS`
CODE_KINDS = {torch.int8: 0, torch.uint8: 1, E4M3: 2, E2M1: 3}  # as `coded_kernels` names them


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
    """As `reference.coded_product`. `out` may be a part of wider rows. `fixed`: one plan for any number of rows."""
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
    """Of a product of so many rows like x's. Numbers of MXFP4 are made in the tile, scales included, so a tile may span
    groups."""
    inputs = inputs_of(codes)
    whole = inputs if codes.dtype == E2M1 else group
    return coded_plan(rows=rows, group=whole, inputs=inputs, element_bytes=x.element_size(), fixed=fixed)
