"""One matrix product of a model, in the form that is fastest on its device.

Called by the lean models for every projection. The form depends only on device, dtype and shape, never on timing or on
the number of rows, so that all workers of a pipeline compute alike:

    CPU, float32                         panels: weights packed once for our own kernel
    CPU, bfloat16 and it computes in it  panels
    CPU, other 16-bit                    widened: float32 panels, x widened, the product rounded
    no compiled kernels, or a GPU        plain: F.linear

Panels are faster than anything torch has from one row to hundreds, and they give a row the same bits whatever other
rows stand beside it, which BLAS does not: a request computes exactly the same in every batch.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.kernels import panels
from cohort.kernels.fused import silu_mul
from cohort.kernels.panels import Arena, Panels

Form = Literal["plain", "panels", "widened"]


def linear_form(device: torch.device, dtype: torch.dtype, inputs: int) -> Form:
    """Which form serves this device, dtype and number of inputs; see the table above."""
    if device.type != "cpu":
        return "plain"
    if panels.available(dtype, inputs):
        return "panels"
    if dtype != torch.float32 and panels.available(torch.float32, inputs):
        return "widened"
    return "plain"


def native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself (AMX or AVX512-BF16); else it is slower than float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and (
        torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )


class Linear:
    """x ↦ x · weightᵀ + bias for x [T, in]."""

    __slots__ = ("bias", "dtype", "form", "in_features", "out_features", "packed", "weight")

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, arena: Arena | None = None, form: Form | None = None
    ) -> None:
        """Takes weight [out, in]; where the form packs it (into `arena`), the caller's tensor may be dropped."""
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.form = form or linear_form(weight.device, weight.dtype, self.in_features)
        self.bias = bias
        self.weight, self.packed = weight, None
        if self.form != "plain":
            self.packed = Panels(weight.float() if self.form == "widened" else weight, arena or Arena())
            self.weight = weight.new_empty(0)
        if self.form == "widened" and bias is not None:
            self.bias = bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty((len(x), self.out_features))
        self.into(x, out)
        return out

    def into(self, x: Tensor, out: Tensor) -> None:
        """out [T, out] = the product; `out` may be float32, then it takes the sums unrounded where they are known."""
        if self.packed is None and x.is_cuda and out.dtype == x.dtype:  # straight into its place
            if self.bias is None:
                torch.mm(x, self.weight.t(), out=out)
            else:
                torch.addmm(self.bias, x, self.weight.t(), out=out)
        elif self.packed is None:
            out.copy_(F.linear(x, self.weight, self.bias))
        elif self.form == "panels":
            self.packed.product(x, self.bias, out)
        else:
            wide = torch.empty((len(x), self.out_features))
            self.packed.product(x.float(), self.bias, wide)
            out.copy_(wide)

    @property
    def panel_data(self) -> Tensor | None:
        """The packed weight, where the form is panels in the model's own dtype."""
        return self.packed.data if self.form == "panels" and self.packed is not None else None

    def add_into(self, x: Tensor, residual: Tensor) -> None:
        """residual [T, out] += the product, rounded before it is added; on a GPU one kernel adds it unrounded."""
        if x.is_cuda and self.bias is None:
            residual.addmm_(x, self.weight.t())
        elif self.form == "panels" and self.packed is not None and self.bias is None:
            self.packed.add_product(x, residual)
        else:
            residual.add_(self(x))


class GatedLinear:
    """x ↦ silu(x · gateᵀ + …) · (x · upᵀ + …): the first half of a gated MLP, in one product where nothing is added."""

    __slots__ = ("_both", "_packed")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, arena: Arena | None = None) -> None:
        """Takes weight [2 · out, in], the gates over the ups."""
        packs = bias is None and linear_form(weight.device, weight.dtype, weight.shape[1]) == "panels"
        self._packed = Panels(weight, arena or Arena(), gated=True) if packs else None
        self._both = None if packs else Linear(weight, bias, arena=arena)

    @property
    def panel_data(self) -> Tensor | None:
        """The packed weight of the fused product, where it is one."""
        return None if self._packed is None else self._packed.data

    def into(self, x: Tensor, out: Tensor) -> None:
        """out [T, out]."""
        if self._packed is not None:
            self._packed.gated_product(x, out)
        elif self._both is not None:
            silu_mul(self._both(x), out)

    def unactivated(self, x: Tensor) -> Tensor:
        """[T, 2 · out], gates before ups: for rows to which something is added before the activation."""
        if self._packed is not None:
            return self._packed.halves(x)
        assert self._both is not None
        return self._both(x)


class Embedding:
    """ids ↦ rows of a table [vocabulary, width]; a table that is also the last product's weight is not kept twice."""

    __slots__ = ("_shared", "_table", "_width")

    def __init__(self, table: Tensor, head: Linear | None = None) -> None:
        """`head`: the product over the same matrix, where the model ties both."""
        self._shared = head.packed if head is not None and head.form == "panels" else None
        self._width = table.shape[1]
        self._table = table.new_empty(0) if self._shared is not None else table

    def into(self, ids: Tensor, out: Tensor) -> None:
        """out [T, width]."""
        if self._shared is not None:
            self._shared.rows(ids, out)
        else:
            torch.index_select(self._table, 0, ids, out=out)
