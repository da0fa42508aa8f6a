"""One matrix product of a model, in the form that is fastest on its device.

Called by the lean models for every projection. The form depends only on device and dtype, never on timing or on the
number of rows, so that all workers of a pipeline compute alike:

    CPU, float32                         packed: weights reordered once for oneDNN
    CPU, bfloat16 and it computes in it  packed
    CPU, other 16-bit                    widened: weights packed in float32, x widened, the product rounded
    anything else                        plain: F.linear

Prepacked products are faster than F.linear from a few rows on (two to three times for the vocabulary at four rows), and
in float32 they give a row the same bits whatever other rows stand beside it, which F.linear's BLAS does not: a request
computes exactly the same in every batch.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

Form = Literal["plain", "packed", "widened"]


def linear_form(device: torch.device, dtype: torch.dtype) -> Form:
    """Which form serves this device and dtype; see the table above."""
    if device.type != "cpu" or not torch._C._has_mkldnn:
        return "plain"
    if dtype == torch.float32:
        return "packed"
    return "packed" if dtype == torch.bfloat16 and native_bfloat16() else "widened"


def native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself (AMX or AVX512-BF16); else it is slower than float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and (
        torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )


class Linear:
    """x ↦ x · weightᵀ + bias for x [T, in]."""

    __slots__ = ("bias", "dtype", "form", "in_features", "out_features", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, form: Form | None = None) -> None:
        """Takes weight [out, in]; where the form packs it, the caller's tensor may be dropped afterwards."""
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self.form = form or linear_form(weight.device, weight.dtype)
        self.bias = bias
        match self.form:
            case "plain":
                self.weight = weight
            case "packed":
                self.weight = torch.ops.mkldnn._reorder_linear_weight(weight)
            case "widened":
                self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.float())
                self.bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        if self.form == "plain":
            return F.linear(x, self.weight, self.bias)
        if self.form == "widened":
            x = x.float()
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out.to(self.dtype) if self.form == "widened" else out
