"""Weights of 8 and 4 bits on a GPU: codes and scales as they are, multiplied without a copy in the model's dtype.

Called by the engine's linear layers, as `quantized_panels` is on a processor. x is not rounded: a product is that of
the dequantised weight within float32's rounding. Decides which codes and groups the kernel takes; never reads a file.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cohort.kernels import batch_invariance, reference
from cohort.kernels.code_dtypes import as_bytes
from cohort.kernels.cpu.quantized_panels import Codes
from cohort.kernels.gpu import available as gpu
from cohort.kernels.types import ServedProduct, served_products, takes


def available(codes: Tensor, group: int, inputs: int) -> bool:
    """Return whether a kernel reads codes of this device, type and group."""
    return gpu.ops_for(codes) is not None and takes(codes.dtype, group, inputs)


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
            shape = (len(each.codes), each.inputs, each.codes.dtype, each.group)
            served_products[ServedProduct(*shape, offsets, biased, fixed=self._fixed)] = None

    @property
    def num_bytes(self) -> int:
        stored = (each for part in self._parts for each in (part.codes, part.scales, part.offsets))
        return sum(each.nbytes for each in stored if each is not None)

    def product(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Compute out [T, outputs] = x · weightᵀ + bias; a float32 `out` takes the sums unrounded."""
        self._each(x, bias, out, add=False)

    def add_product(self, x: Tensor, residual: Tensor) -> None:
        """Add the product to residual [T, outputs], rounded once."""
        self._each(x, None, residual, add=True)

    def rows(self, ids: Tensor, out: Tensor) -> None:
        """Copy these rows of a weight in one part to out [T, inputs]."""
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
