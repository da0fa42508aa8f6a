"""Weights of 8 and 4 bits on a GPU: codes and scales as they are, multiplied without a copy in the model's dtype.

Called by the engine's linear layers, as `quantized_panels` is on a processor. x is not rounded: a product is that of
the dequantised weight within float32's rounding. Decides which codes and groups the kernel takes; never reads a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cohort.kernels import batch_invariance, reference
from cohort.kernels.code_dtypes import E2M1, E4M3, MX_GROUP, as_bytes, bits_of, inputs_of
from cohort.kernels.code_units import tiled
from cohort.kernels.gpu import available as gpu
from cohort.kernels.quantized_panels import Codes

_CODES = (torch.int8, torch.uint8, E4M3, E2M1)


@dataclass(frozen=True, slots=True)
class ServedProduct:
    """A product over codes as the kernel is compiled for it."""

    outputs: int
    inputs: int
    codes: torch.dtype
    group: int
    offsets: bool
    biased: bool
    experts: int = 0
    """Of so many experts, whose rows are grouped; 0: of all rows."""
    gathers: bool = False
    """Of experts: rows are tokens', in any order, else sorted already."""
    clamped: bool = False
    """Of experts: `ClampedSwiglu` follows it, else SiLU."""
    fixed: bool = False
    """Tiles do not follow the number of rows (`batch_invariance`)."""


_made: dict[ServedProduct, None] = {}


def products_made() -> tuple[ServedProduct, ...]:
    """Of all weights of this process so far, each kind once: what is to be compiled before requests come."""
    return tuple(_made)


def takes(codes: torch.dtype, group: int, inputs: int) -> bool:
    """Whether the kernel multiplies weights of these codes (see `code_dtypes`) in groups of so many inputs."""
    if codes == E2M1:
        return group == MX_GROUP and inputs % MX_GROUP == 0
    return codes in _CODES and tiled(bits=bits_of(codes), group=group, inputs=inputs)


def available(codes: Tensor, group: int, inputs: int) -> bool:
    """Whether these codes are where a kernel reads them."""
    return gpu.ops_for(codes) is not None and takes(codes.dtype, group, inputs)


@dataclass(frozen=True, slots=True)
class ExpertCodes:
    """One product of every expert of a mixture: codes [experts, outputs, inputs], of nibbles [experts, outputs,
    inputs / 2]; scales and offsets float32 [experts, outputs, groups], of E2M1 scales in E8M0 and no offsets."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor | None
    group: int

    def is_to_be_compiled(self, *, gathers: bool, biased: bool = False, clamped: bool = False) -> None:
        """`products_made` tells it from now on."""
        experts, outputs, _ = self.codes.shape
        offsets, inputs = self.offsets is not None, inputs_of(self.codes)
        kind = self.codes.dtype
        fixed = batch_invariance.in_force()
        made = ServedProduct(outputs, inputs, kind, self.group, offsets, biased, experts, gathers, clamped, fixed)
        _made[made] = None


class CodedMatrix:
    """One weight [outputs, inputs] in codes, or several with the same inputs, whose outputs follow one another."""

    __slots__ = ("_fixed", "_parts", "inputs", "outputs")

    def __init__(self, parts: Sequence[Codes], *, biased: bool = False) -> None:
        """`biased`: products add a bias."""
        self._parts = [
            Codes(
                part.codes.contiguous(),
                part.scales.contiguous(),
                None if part.offsets is None else part.offsets.contiguous(),
                part.group,
            )
            for part in parts
        ]
        self._fixed = batch_invariance.in_force()
        self.inputs = parts[0].inputs
        self.outputs = sum(len(part.codes) for part in parts)
        for each in self._parts:
            offsets = each.offsets is not None
            made = ServedProduct(
                len(each.codes), each.inputs, each.codes.dtype, each.group, offsets, biased, fixed=self._fixed
            )
            _made[made] = None

    @property
    def num_bytes(self) -> int:
        """Of codes, scales and offsets."""
        return sum(
            part.codes.nbytes + part.scales.nbytes + (0 if part.offsets is None else part.offsets.nbytes)
            for part in self._parts
        )

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """out [T, outputs] = x · weightᵀ + bias; `out` may be float32, then it takes the sums unrounded."""
        self._each(x, bias, out, add=False)

    def add_product(self, x: Tensor, residual: Tensor) -> None:
        """residual [T, outputs] += the product, rounded once."""
        self._each(x, None, residual, add=True)

    def rows(self, ids: Tensor, out: Tensor) -> None:
        """out [T, inputs] = the weight's rows of these numbers; of a weight in one part."""
        (part,) = self._parts
        offsets = None if part.offsets is None else part.offsets[ids]
        codes, scales = (as_bytes(each)[ids].view(each.dtype) for each in (part.codes, part.scales))
        out.copy_(reference.coded_numbers(codes, scales, offsets, part.group))

    def _each(self, x: Tensor, bias: Tensor | None, out: Tensor, *, add: bool) -> None:
        ops, first = gpu.ops_for(x) or reference, 0
        for part in self._parts:
            end = first + len(part.codes)
            own = None if bias is None else bias[first:end]
            weight = (part.codes, part.scales, part.offsets, part.group)
            ops.coded_product(x, *weight, own, out[:, first:end], add=add, fixed=self._fixed)
            first = end
