"""The elementwise steps of a Llama-shaped layer, each in one pass over memory.

Called by the lean models between their matrix products; dispatches to C++, to Triton on a GPU, or to the
torch reference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from cohort.kernels import reference
from cohort.kernels.cpu import native
from cohort.kernels.gpu import available as gpu
from cohort.kernels.ops.paged_attention import write_kv


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Compute out = x / sqrt(mean(x²) + eps) · weight over the last dimension; `out` may be `x`, both strided views."""
    (native.ops_for(x) or gpu.ops_for(x) or reference).rms_norm(x, weight, eps, out)


def wide_rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """Compute `rms_norm` with a weight in float32, rounded once, at the end (Gemma, gpt-oss)."""
    if x.dtype == torch.float32:
        rms_norm(x, weight, eps, out)
    elif (ops := gpu.ops_for(x)) is not None:
        ops.rms_norm(x, weight, eps, out)
    else:
        reference.wide_rms_norm(x, weight, eps, out)


def rope_inplace(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor) -> None:
    """Apply the rotary embedding to q [T, Hq, D] and k [T, Hkv, D] in place (views of one fused tensor are fine).

    cos and sin are float32 [max_positions, rotary_dim / 2]; rotate-half convention of Llama; with rotary_dim < D the
    rest of each head stays as it is. positions int64 [T].
    """
    (native.ops_for(q) or gpu.ops_for(q) or reference).rope_inplace(q, k, cos, sin, positions)


def silu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Compute out [T, I] = silu(gate) · up with gate_up [T, 2I], gate first."""
    (native.ops_for(gate_up) or gpu.ops_for(gate_up) or reference).silu_mul(gate_up, out)


def gelu_mul(gate_up: Tensor, out: Tensor) -> None:
    """Compute out [T, I] = gelu(gate) · up with gate_up [T, 2I], gate first; the form with the hyperbolic tangent. On a
    GPU an element does not follow the others, where torch has kernels for other shapes (`batch_invariance`)."""
    if (ops := gpu.ops_for(gate_up)) is not None:
        ops.gelu_mul(gate_up, out)
    else:
        gate, up = gate_up.chunk(2, dim=-1)
        out.copy_(F.gelu(gate, approximate="tanh").mul_(up))


def soft_cap(x: Tensor, cap: float) -> None:
    """Compute x float32 [S, V] = cap · tanh(x / cap); see `gelu_mul`."""
    if (ops := gpu.ops_for(x)) is not None:
        ops.soft_cap(x, cap)
    else:
        x.div_(cap).tanh_().mul_(cap)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float, out: Tensor) -> None:
    """Compute out [T, I] = (up + 1) · gate · sigmoid(alpha · gate) with gate_up [T, 2I], gate first; gate is clamped to
    at most `limit`, up to ±`limit` (gpt-oss)."""
    (native.ops_for(gate_up) or gpu.ops_for(gate_up) or reference).clamped_swiglu(gate_up, alpha, limit, out)


def rope_and_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    kv: Tensor,
    layer: int,
    slot_mapping: Tensor,
) -> None:
    """Run `rope_inplace` of query and key, then `write_kv`: on a GPU one launch. `key` is not to be read afterwards."""
    if (ops := gpu.ops_for(kv)) is not None:
        ops.rope_and_write_kv(query, key, value, cos, sin, positions, kv, layer, slot_mapping)
    else:
        rope_inplace(query, key, cos, sin, positions)
        write_kv(key, value, kv, layer, slot_mapping)
