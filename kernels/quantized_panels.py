"""Weights of 8 and 4 bits packed for the CPU's matrix products; the products are those of `Panels`.

Called by the engine's linear layers for checkpoints in few bits. See `csrc/linear_quantized.cpp` for the layout and for
what a product computes. Decides which codes, groups and scales can be packed as they are; never dequantises.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.kernels import native
from cohort.kernels.panels import Arena, Panels

_UNITS = (32, 16)
_LARGEST_EXPONENT = 14  # a row's largest scale is moved into [2^14, 2^15), so its smallest ones stay normal float16


def unit_of(group: int, inputs: int) -> int | None:
    """Inputs that are summed as integers, for scales in groups of `group`; None where such groups cannot be packed."""
    if group >= inputs:
        return _UNITS[0]
    return next((unit for unit in _UNITS if group % unit == 0), None)


def available(codes: torch.dtype, group: int, inputs: int) -> bool:
    """Whether weights of these codes (int8; uint8 of two nibbles) and groups are served on this processor."""
    if native.operators() is None or unit_of(group, inputs) is None:
        return False
    return codes == torch.int8 or (codes == torch.uint8 and inputs % 2 == 0)


class QuantizedPanels(Panels):
    """One packed weight [outputs, inputs] of codes with scales, or gate over up as in `Panels`."""

    __slots__ = ()

    def __init__(
        self,
        codes: Tensor,
        scales: Tensor,
        offsets: Tensor | None,
        group: int,
        arena: Arena,
        *,
        gated: bool = False,
    ) -> None:
        """codes: int8 [rows, inputs], or uint8 [rows, inputs / 2] with the earlier input in the low nibble; scales and
        offsets: float32 [rows, groups]. All may be dropped afterwards.

        Scales and offsets are kept as float16 times a power of two for each row. Those that came from float16 or
        bfloat16 stay exact unless 2^28 below the row's largest; others are rounded by at most 2^-12 of themselves.
        """
        rows, stored = codes.shape
        nibbles = codes.dtype == torch.uint8
        self.inputs = stored * (2 if nibbles else 1)
        self.gated = gated
        self.outputs = rows // 2 if gated else rows
        self._ops = native.operators()
        zero = 0
        if nibbles and offsets is not None and torch.equal(offsets, scales * -8):
            zero, offsets = 8, None
        factors, small, small_offsets = _halves(scales, offsets)
        unit = unit_of(group, self.inputs) or 0
        size = self._ops.quantized_bytes(4 if nibbles else 8, unit, offsets is not None, gated, rows, self.inputs)
        self.data = arena.take((size,), torch.uint8)
        codes = codes.contiguous()
        self._ops.pack_quantized(codes, factors, small, small_offsets, group, zero, unit, gated, self.data)


def _halves(scales: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Factors float32 [rows], scales and offsets float16 [rows, groups]: factor times these are the given ones."""
    if scales.shape[1] == 1 and offsets is None:
        return scales[:, 0].contiguous(), torch.ones_like(scales, dtype=torch.float16), None
    largest = scales.abs().amax(dim=1)
    if offsets is not None:
        largest = torch.maximum(largest, offsets.abs().amax(dim=1))
    exponents = torch.frexp(largest).exponent - (_LARGEST_EXPONENT + 1)
    factors = torch.ldexp(torch.ones_like(largest), exponents)
    factors = torch.where(largest > 0, factors, torch.ones_like(largest)).contiguous()
    small = (scales / factors[:, None]).half().contiguous()
    return factors, small, None if offsets is None else (offsets / factors[:, None]).half().contiguous()
