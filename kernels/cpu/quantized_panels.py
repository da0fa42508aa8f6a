"""Weights of 8 and 4 bits packed for the CPU's matrix products; the products are those of `Panels`.

Called by the engine's linear layers for checkpoints in few bits. See `csrc/linear_quantized.cpp` for the layout and for
what a product computes. Decides which codes, groups and scales can be packed as they are; never dequantises.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.kernels.code_dtypes import bits_of, inputs_of
from cohort.kernels.code_units import packable
from cohort.kernels.code_units import unit_of as unit_of
from cohort.kernels.cpu import native
from cohort.kernels.cpu.panels import Arena, Panels

_CODES = frozenset({torch.int8, torch.uint8, torch.float8_e4m3fn})
_LARGEST_EXPONENT = 14  # a row's largest scale is moved into [2^14, 2^15), so its smallest ones stay normal float16


def available(codes: torch.dtype, group: int, inputs: int, *, offsets: bool = False) -> bool:
    """Return whether weights of these codes (int8; uint8 of two nibbles; E4M3) and groups are served here."""
    if codes not in _CODES or native.operators() is None:
        return False
    return packable(
        bits=bits_of(codes), floating=codes == torch.float8_e4m3fn, group=group, inputs=inputs, offsets=offsets
    )


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight of codes as it is packed: int8 or float8_e4m3fn [rows, inputs], or uint8 [rows, inputs / 2] with the
    earlier input in the low nibble. scales and offsets (none of E4M3): float32 [rows, groups]."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    group: int

    @property
    def nibbles(self) -> bool:
        return self.codes.dtype == torch.uint8

    @property
    def floating(self) -> bool:
        return self.codes.dtype == torch.float8_e4m3fn

    @property
    def even_group(self) -> int:
        """Group of E4M3 codes, or all inputs where it is no shorter."""
        return min(self.group, self.inputs)

    @property
    def inputs(self) -> int:
        return inputs_of(self.codes)


class QuantizedPanels(Panels):
    """One packed weight [outputs, inputs] of codes with scales, or gate over up as in `Panels`.

    Its outputs may come in several parts of different kinds, one after the other. Scales and offsets are kept as
    float16 times a power of two for each row. Those that came from float16 or bfloat16 stay exact unless 2^28 below the
    row's largest; others are rounded by at most 2^-12 of themselves. Scales of E4M3 stay float32.
    """

    __slots__ = ()

    def __init__(self, parts: Sequence[Codes], arena: Arena, *, gated: bool = False) -> None:
        """Pack the tensors, which may be dropped afterwards. With `gated` the only part's first half are the gates."""
        rows = sum(len(part.codes) for part in parts)
        self.inputs = parts[0].inputs
        self.gated = gated
        self.outputs = rows // 2 if gated else rows
        self._ops = native.operators()
        sizes = [self._bytes(part) for part in parts]
        self.data = arena.take((sum(sizes),), torch.uint8)
        for part, place in zip(parts, torch.split(self.data, sizes), strict=True):
            codes = part.codes.contiguous()
            if part.floating:
                self._ops.pack_e4m3(codes, part.scales.contiguous(), part.even_group, gated, place)
                continue
            unit, zero, factors, scales, offsets = _prepare(part)
            self._ops.pack_quantized(codes, factors, scales, offsets, part.group, zero, unit, gated, place)

    def _bytes(self, part: Codes) -> int:
        unit, with_offsets = part.even_group, False
        if not part.floating:
            unit, zero = unit_of(part.group, part.inputs) or 0, _zero(part)
            with_offsets = part.offsets is not None and not zero
        bits, rows = bits_of(part.codes.dtype), len(part.codes)
        size: int = self._ops.quantized_bytes(bits, unit, with_offsets, self.gated, rows, part.inputs, part.floating)
        return size


def _zero(part: Codes) -> int:
    """Return the code that stands for 0: 8 where offsets only move the codes by 8 and need not be stored, else 0."""
    moved = part.nibbles and part.offsets is not None and torch.equal(part.offsets, part.scales * -8)
    return 8 if moved else 0


def _prepare(part: Codes) -> tuple[int, int, Tensor, Tensor, Tensor | None]:
    """Return the unit, the zero code, and `_halves`."""
    zero = _zero(part)
    return unit_of(part.group, part.inputs) or 0, zero, *_halves(part.scales, None if zero else part.offsets)


def _halves(scales: Tensor, offsets: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return factors float32 [rows], and scales and offsets float16 [rows, groups] to be multiplied by them."""
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
