"""Products over plain weights on a GPU that give a row the same bits beside any other rows (ADR 14).

Called by the engine's linear layers where `engine.batch_invariant` is set; cuBLAS, which computes them otherwise,
chooses a kernel by the number of rows.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor
from triton import knobs

from cohort.kernels.gpu.plan import fixed_plan, power_of_two_from
from cohort.kernels.gpu.products.fixed_kernels import add_parts, product_rows

_WIDEN_PRODUCTS = bool(knobs.runtime.interpret)  # as `attention.WIDEN_PRODUCTS`
_ALIGNED_BYTES = 16
_SUM_TILE = 1024
_planned = lru_cache(fixed_plan)


def fixed_product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, add: bool = False) -> None:
    """out [T, outputs] = x [T, inputs] · weightᵀ + bias, or with `add` out += the product; rounded once. `out` may be
    float32 beside a weight in 16 bits. A row of `out` follows its row of x alone."""
    outputs, inputs = weight.shape
    rows = len(x)
    if x.shape != (rows, inputs) or out.shape != (rows, outputs) or x.dtype != weight.dtype:
        raise ValueError(f"x {x.dtype} {list(x.shape)}, out {list(out.shape)} for {weight.dtype} {list(weight.shape)}")
    if not weight.is_contiguous() or not (bias is None or (bias.is_contiguous() and bias.shape == (outputs,))):
        raise ValueError("weight and bias must be dense, and the bias as long as a row of the product")
    if not rows:
        return
    x = _settled(x)
    there = _settled(out)
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
        there,
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
            there,
            rows,
            OUTPUTS=outputs,
            PARTS=plan.parts,
            BIAS=bias is not None,
            ADD=add,
            TILE=tile,
            num_warps=4,
        )
    if there is not out:
        out.copy_(there)


def _settled(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that lies as all others do: Triton compiles another variant for one that does not."""
    if tensor.is_contiguous() and tensor.data_ptr() % _ALIGNED_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
