"""RMSNorm whose weight stays in float32 to the end: rounded once, unlike a Llama's (Gemma, gpt-oss).

Called by the lean models that have it.
"""

from __future__ import annotations

from torch import Tensor

from cohort.kernels.ops.fused import wide_rms_norm


class WideNorm:
    """x ↦ x / sqrt(mean(x²) + eps) · (shift + weight)."""

    __slots__ = ("_eps", "_factor", "_shift")

    def __init__(self, weight: Tensor, eps: float, *, shift: float = 0.0) -> None:
        self._factor, self._eps, self._shift = weight, eps, shift

    def prepare(self) -> None:
        """Once, when the weight has been read: on a GPU its bytes are not there before all of the files are."""
        self._factor = self._shift + self._factor.float()

    def into(self, x: Tensor, out: Tensor) -> None:
        """`out` may be x; both may be strided views."""
        wide_rms_norm(x, self._factor, self._eps, out)
