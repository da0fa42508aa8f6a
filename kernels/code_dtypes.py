"""The dtypes in which codes of weights lie, and what follows from one: how many inputs a byte holds.

Read by the reference and by what calls the kernels of a GPU. int8 and E4M3 are a byte an input. Of `uint8` and `E2M1`,
as checkpoints in MXFP4 have them, a byte is two inputs: 2j in the low nibble of byte j, 2j + 1 in the high one.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
E2M1 = torch.float4_e2m1fn_x2
"""OCP Microscaling Formats v1.0: a sign, two bits of exponent and one of mantissa: 0 to 6."""
E8M0 = torch.float8_e8m0fnu
"""Scales of E2M1: a power of two for each `MX_GROUP` inputs."""
MX_GROUP = 32

_PAIRED = (torch.uint8, E2M1)
_UNREAD_BY_KERNELS = (E4M3, E2M1, E8M0)


def bits_of(codes: torch.dtype) -> int:
    return 4 if codes in _PAIRED else 8


def inputs_of(codes: Tensor) -> int:
    """Return the inputs of a weight of codes [..., outputs, stored]."""
    return codes.shape[-1] * (2 if codes.dtype in _PAIRED else 1)


def as_bytes(tensor: Tensor) -> Tensor:
    """Return floating-point codes or scales as bytes, which is how kernels read them; others stay as they are."""
    return tensor.view(torch.uint8) if tensor.dtype in _UNREAD_BY_KERNELS else tensor
