"""Weights packed for the CPU's matrix products, and the products over them.

Called by the engine's linear layers. A model's weights never change while it serves, so they are reordered once, when
it is loaded, into the order in which a step reads them (see `csrc/linear.cpp`). There is no torch twin to fall back on:
where `available` says no, the engine multiplies plain weights with torch's own operators.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from cohort.kernels.cpu import native

_CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64


def available(dtype: torch.dtype, inputs: int) -> bool:
    """Return whether products with this dtype and number of inputs are served on this processor."""
    if (ops := native.operators()) is None:
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and inputs % 2 == 0 and ops.panels_multiply_bf16())


class Arena:
    """Memory for many packed weights, on huge pages, cut from large pieces. Freed with the last tensor of a piece."""

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeros. Pages that are not written cost nothing, so the end of a piece is not wasted."""
        size = math.prod(shape) * dtype.itemsize
        if self._used + size > len(self._chunk):
            self._chunk, self._used = huge_zeros(max(size, _CHUNK_BYTES)), 0
        begin = self._used
        self._used = -(-(begin + size) // _ALIGNMENT) * _ALIGNMENT
        return self._chunk[begin : begin + size].view(dtype).view(shape)


def huge_zeros(size: int) -> Tensor:
    """Return `size` zero bytes, uint8, on huge pages where the kernels are there and the system grants them."""
    ops = native.operators()
    out: Tensor = torch.zeros(size, dtype=torch.uint8) if ops is None else ops.huge_zeros(size)
    return out


class Panels:
    """One packed weight [outputs, inputs]; `gated`: gate over up, whose activated product is what comes out."""

    __slots__ = ("_ops", "data", "gated", "inputs", "outputs")

    def __init__(self, weight: Tensor, arena: Arena, *, gated: bool = False) -> None:
        """`weight` may be dropped afterwards. With `gated` its first half are the gates."""
        rows, self.inputs = weight.shape
        self.gated = gated
        self.outputs = rows // 2 if gated else rows
        self._ops: Any = native.operators()
        width = self._ops.panel_outputs()
        panels = -(-self.outputs // (width // 2 if gated else width))
        pair = (2,) if weight.dtype == torch.bfloat16 else ()
        self.data = arena.take((panels, self.inputs // (len(pair) + 1), width, *pair), weight.dtype)
        self._ops.pack_panels(weight.contiguous(), self.data, gated)

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Compute out [T, outputs] = x [T, inputs] · weightᵀ + bias; a float32 `out` takes the sums unrounded."""
        self._ops.panel_product(x, self.data, bias, out)

    def add_product(self, x: Tensor, residual: Tensor) -> None:
        """Add x · weightᵀ to residual [T, outputs]; the product is rounded before."""
        self._ops.panel_product_added(x, self.data, residual)

    def gated_product(self, x: Tensor, out: Tensor) -> None:
        """Compute out [T, outputs] = silu(x · gateᵀ) · (x · upᵀ)."""
        self._ops.panel_product_gated(x, self.data, out)

    def halves(self, x: Tensor) -> Tensor:
        """Return [T, 2 · outputs]: the gates and the ups of a gated weight, before their activation."""
        width = self._ops.panel_outputs()
        panels = -(-self.outputs // (width // 2))
        both = x.new_empty((len(x), panels * width))
        self._ops.panel_product(x, self.data, None, both)
        apart = both.view(len(x), panels, 2, width // 2).transpose(1, 2).reshape(len(x), 2, -1)
        return apart[:, :, : self.outputs].reshape(len(x), -1)

    def rows(self, ids: Tensor, out: Tensor) -> None:
        """Copy out[t] = weight[ids[t]]: the embedding, where it is the same matrix as the last product's."""
        self._ops.panel_rows(self.data, ids, out)
