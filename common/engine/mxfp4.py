"""MXFP4 weights as gpt-oss checkpoints have them: two 4-bit codes a byte, a power of two for each 32 inputs.

Called by `lean_gpt_oss` at load, an expert at a time. OCP Microscaling Formats v1.0: elements E2M1, scales E8M0.

In the exchange form of `quantized` this would be a code "e2m1" (codes as "uint4" has them: input 2j in the low nibble
of byte j) in groups of 32, `scales` the powers of two as float32, no offsets. A product that packs it needs the sixteen
values below in place of 0 to 15.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
"""Inputs that share a scale."""

_BIAS = 127
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def dequantized(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs] in `dtype` of blocks uint8 [outputs, inputs / 32, 16] and scales uint8 [outputs, inputs / 32].

    Exact in bfloat16 and float32 but for numbers below 2^-126.
    """
    outputs, groups, _ = blocks.shape
    values = torch.tensor(_VALUES, dtype=torch.float32, device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).view(outputs, groups, GROUP)
    numbers = values[codes.int()]
    torch.ldexp(numbers, (scales.int() - _BIAS).unsqueeze(-1), out=numbers)
    return numbers.view(outputs, groups * GROUP).to(dtype)
