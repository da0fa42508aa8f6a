"""Weights of 8 and 4 bits packed for the CPU's matrix products; the products are those of `Panels`.

Called by the engine's linear layers for checkpoints in few bits. See `csrc/linear_quantized.cpp` for the layout and for
what a product computes. Decides which codes, groups and scales can be packed as they are; never dequantises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight of codes as it is packed: int8 [rows, inputs], or uint8 [rows, inputs / 2] with the earlier input in the
    low nibble. scales and offsets: float32 [rows, groups]."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    group: int

    @property
    def nibbles(self) -> bool:
        return self.codes.dtype == torch.uint8

    @property
    def inputs(self) -> int:
        return self.codes.shape[1] * (2 if self.nibbles else 1)


class QuantizedPanels(Panels):
    """One packed weight [outputs, inputs] of codes with scales, or gate over up as in `Panels`.

    Its outputs may come in several parts of different kinds, one after the other. Scales and offsets are kept as
    float16 times a power of two for each row. Those that came from float16 or bfloat16 stay exact unless 2^28 below the
    row's largest; others are rounded by at most 2^-12 of themselves.
    """

    __slots__ = ()

    def __init__(self, parts: Sequence[Codes], arena: Arena, *, gated: bool = False) -> None:
        """The tensors may be dropped afterwards. With `gated` the first half of the only part are the gates."""
        rows = sum(len(part.codes) for part in parts)
        self.inputs = parts[0].inputs
        self.gated = gated
        self.outputs = rows // 2 if gated else rows
        self._ops = native.operators()
        prepared = [_prepare(part) for part in parts]
        sizes = [
            self._ops.quantized_bytes(
                4 if part.nibbles else 8, unit, offsets is not None, gated, len(part.codes), part.inputs
            )
            for part, (unit, _, _, _, offsets) in zip(parts, prepared, strict=True)
        ]
        self.data = arena.take((sum(sizes),), torch.uint8)
        places = torch.split(self.data, sizes)
        for part, place, (unit, zero, factors, scales, offsets) in zip(parts, places, prepared, strict=True):
            codes = part.codes.contiguous()
            self._ops.pack_quantized(codes, factors, scales, offsets, part.group, zero, unit, gated, place)


def _prepare(part: Codes) -> tuple[int, int, Tensor, Tensor, Tensor | None]:
    """Unit, zero of the codes, and `_halves`: offsets that only move 0 to the code 8 need not be kept."""
    zero, offsets = 0, part.offsets
    if part.nibbles and offsets is not None and torch.equal(offsets, part.scales * -8):
        zero, offsets = 8, None
    return unit_of(part.group, part.inputs) or 0, zero, *_halves(part.scales, offsets)


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
