"""One matrix product of a model, in the form that is fastest on its device.

Called by the lean models for every projection. The form depends only on device, dtype and shape, never on timing or on
the number of rows, so that all workers of a pipeline compute alike:

    CPU, float32                         panels: weights packed once for our own kernel
    CPU, bfloat16 and it computes in it  panels
    CPU, other 16-bit                    widened: float32 panels, x widened, the product rounded
    CPU, codes of 8 or 4 bits            quantized: codes and scales packed as they are, x rounded to 8 bits inside
    CPU, codes in E4M3                   quantized: likewise, x as it is
    GPU, codes of 8 or 4 bits or E4M3    coded: codes and scales as they are, x as it is
    GPU, batch-invariant                 fixed: our own kernel, one shape of tile for any number of rows
    no compiled kernels, or a GPU        plain: F.linear

Panels are faster than anything torch has from one row to hundreds, and they give a row the same bits whatever other
rows stand beside it, which BLAS does not: a request computes exactly the same in every batch. Codes that no kernel
takes (groups that are no multiple of 16, on a GPU of 32) are dequantised here and become another form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.common.engine.weights.quantized import QuantizedWeight, stacked
from cohort.kernels import batch_invariance
from cohort.kernels.cpu import panels, quantized_panels
from cohort.kernels.cpu.panels import Arena, Panels
from cohort.kernels.cpu.quantized_panels import Codes, QuantizedPanels
from cohort.kernels.gpu import available as gpu
from cohort.kernels.ops import coded
from cohort.kernels.ops.coded import CodedMatrix
from cohort.kernels.ops.fused import silu_mul

Form = Literal["plain", "panels", "widened", "quantized", "coded", "fixed"]
Matrix = Tensor | Sequence[QuantizedWeight]
"""A product's weight [out, in], or codes whose outputs follow one another."""


def linear_form(device: torch.device, dtype: torch.dtype, inputs: int) -> Form:
    """Return which form serves this device, dtype and number of inputs; see the table above."""
    if device.type != "cpu":
        return "fixed" if batch_invariance.in_force() else "plain"
    if panels.available(dtype, inputs):
        return "panels"
    if dtype != torch.float32 and panels.available(torch.float32, inputs):
        return "widened"
    return "plain"


def on_gpu(weight: QuantizedWeight) -> bool:
    return weight.codes.device.type == "cuda"


def packs_codes(weight: QuantizedWeight) -> bool:
    """Return whether its codes are multiplied as they are where they lie."""
    codes, offsets = weight.codes, weight.offsets is not None
    if on_gpu(weight):
        return coded.available(codes, weight.group, weight.shape[1])
    available = quantized_panels.available(codes.dtype, weight.group, weight.shape[1], offsets=offsets)
    return codes.device.type == "cpu" and available


def settled(weight: Matrix, dtype: torch.dtype) -> Matrix:
    """Return the weight in the form a product takes: codes where all of them can be packed, else numbers of `dtype`."""
    if isinstance(weight, Tensor) or all(packs_codes(part) for part in weight):
        return weight
    return torch.cat([part.dequantized().to(dtype) for part in weight])


def _codes(parts: Sequence[QuantizedWeight]) -> list[Codes]:
    return [Codes(part.codes, part.scales, part.offsets, part.group) for part in parts]


class Linear:
    """x ↦ x · weightᵀ + bias for x [T, in]."""

    __slots__ = ("bias", "dtype", "form", "in_features", "out_features", "packed", "weight")

    def __init__(
        self,
        weight: Matrix,
        bias: Tensor | None = None,
        *,
        arena: Arena | None = None,
        form: Form | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take weight [out, in]; where the form packs it (into `arena`), the caller's tensor may be dropped. `dtype`:
        of x and of codes that are dequantised; None where the weight is no codes."""
        weight = settled(weight, dtype or torch.float32)
        self.bias = bias
        if not isinstance(weight, Tensor):
            self.out_features = sum(part.shape[0] for part in weight)
            self.in_features = weight[0].shape[1]
            self.dtype, self.form = dtype or torch.float32, "coded" if on_gpu(weight[0]) else "quantized"
            self.weight = torch.empty(0, dtype=self.dtype)
            self.packed: Panels | CodedMatrix | None = None
            if self.form == "coded":
                self.packed = CodedMatrix(_codes(weight), biased=bias is not None)
            else:
                self.packed = QuantizedPanels(_codes(weight), arena or Arena())
        else:
            self.out_features, self.in_features = weight.shape
            self.dtype = weight.dtype
            self.form = form or linear_form(weight.device, weight.dtype, self.in_features)
            self.weight, self.packed = weight, None
            if self.form == "fixed":
                made = batch_invariance.FixedProduct(self.out_features, self.in_features, bias is not None)
                batch_invariance.is_to_be_compiled(made)
            elif self.form != "plain":
                self.packed = Panels(weight.float() if self.form == "widened" else weight, arena or Arena())
                self.weight = weight.new_empty(0)
        if bias is not None and self._widens:
            self.bias = bias.float()

    @property
    def _widens(self) -> bool:
        """x and the product are float32 beside a model in 16 bits."""
        return self.form == "widened" or (self.form == "quantized" and self.dtype == torch.float16)

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((len(x), self.out_features))
        self.into(x, out)
        return out

    def into(self, x: Tensor, out: Tensor) -> None:
        """Write the product to out [T, out]; where `out` is float32, it takes the sums unrounded if they are known."""
        if self.form == "fixed":
            gpu.ops_for(x).fixed_product(x, self.weight, self.bias, out)
        elif self.packed is None and x.is_cuda and out.dtype == x.dtype:  # straight into its place
            if self.bias is None:
                torch.mm(x, self.weight.t(), out=out)
            else:
                torch.addmm(self.bias, x, self.weight.t(), out=out)
        elif self.packed is None:
            out.copy_(F.linear(x, self.weight, self.bias))
        elif not self._widens:
            self.packed.product(x, self.bias, out)
        else:
            wide = torch.empty((len(x), self.out_features))
            self.packed.product(x.float(), self.bias, wide)
            out.copy_(wide)

    @property
    def panel_data(self) -> Tensor | None:
        """The packed weight, where it takes x in the model's own dtype."""
        return self.packed.data if isinstance(self.packed, Panels) and not self._widens else None

    def add_into(self, x: Tensor, residual: Tensor) -> None:
        """Add the product to residual [T, out], rounded before; on a GPU one kernel adds it unrounded."""
        if self.form == "fixed" and self.bias is None:
            gpu.ops_for(x).fixed_product(x, self.weight, None, residual, add=True)
        elif self.packed is None and x.is_cuda and self.bias is None:
            residual.addmm_(x, self.weight.t())
        elif self.packed is not None and not self._widens and self.bias is None:
            self.packed.add_product(x, residual)
        else:
            residual.add_(self(x))


def _of_one_kind(weight: Sequence[QuantizedWeight]) -> bool:
    """Return whether gates and ups are packed together: they lie in one weight, or in two that can be one."""
    first = weight[0]
    if on_gpu(first):
        return False
    return len(weight) == 1 or (
        len(weight) == 2 and all((w.code, w.group, w.shape) == (first.code, first.group, first.shape) for w in weight)
    )


class GatedLinear:
    """x ↦ silu(x · gateᵀ + …) · (x · upᵀ + …): the first half of a gated MLP, in one product where nothing is added."""

    __slots__ = ("_both", "_packed")

    def __init__(
        self,
        weight: Matrix,
        bias: Tensor | None = None,
        *,
        arena: Arena | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Take weight [2 · out, in], the gates over the ups; codes as one weight, or as these two. `dtype` as in
        `Linear`."""
        weight = settled(weight, dtype or torch.float32)
        self._packed: Panels | None = None
        if bias is None and isinstance(weight, Tensor):
            if linear_form(weight.device, weight.dtype, weight.shape[1]) == "panels":
                self._packed = Panels(weight, arena or Arena(), gated=True)
        elif bias is None and not isinstance(weight, Tensor) and dtype != torch.float16 and _of_one_kind(weight):
            one = weight if len(weight) == 1 else [stacked(list(weight))]
            self._packed = QuantizedPanels(_codes(one), arena or Arena(), gated=True)
        self._both = Linear(weight, bias, arena=arena, dtype=dtype) if self._packed is None else None

    @property
    def panel_data(self) -> Tensor | None:
        """The packed weight of the fused product, where it is one."""
        return None if self._packed is None else self._packed.data

    def into(self, x: Tensor, out: Tensor) -> None:
        """Compute out [T, out]."""
        if self._packed is not None:
            self._packed.gated_product(x, out)
        elif self._both is not None:
            silu_mul(self._both(x), out)

    def unactivated(self, x: Tensor) -> Tensor:
        """Return [T, 2 · out], gates before ups: for rows to which something is added before the activation."""
        if self._packed is not None:
            return self._packed.halves(x)
        assert self._both is not None
        return self._both(x)


class Embedding:
    """ids ↦ rows of a table [vocabulary, width]; a table that is also the last product's weight is not kept twice."""

    __slots__ = ("_shared", "_table")

    def __init__(
        self, table: Matrix, head: Linear | None = None, *, arena: Arena | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """`head`: the product over the same matrix, where the model ties both. `dtype` as in `Linear`."""
        table = settled(table, dtype or torch.float32)
        self._shared: Panels | CodedMatrix | None = None
        self._table = torch.empty(0)
        if head is not None and (head.panel_data is not None or head.form == "coded"):
            self._shared = head.packed
        elif isinstance(table, Tensor):
            self._table = table
        elif on_gpu(table[0]):
            self._shared = CodedMatrix(_codes(table), biased=False)
        else:
            self._shared = QuantizedPanels(_codes(table), arena or Arena())

    def into(self, ids: Tensor, out: Tensor) -> None:
        """Write rows to out [T, width]."""
        if self._shared is None:
            torch.index_select(self._table, 0, ids, out=out)
        elif out.dtype == torch.float16 and isinstance(self._shared, Panels):
            # Panels of codes, whose kernels write float32 and bfloat16.
            wide = torch.empty(out.shape)
            self._shared.rows(ids, wide)
            out.copy_(wide)
        else:
            self._shared.rows(ids, out)
