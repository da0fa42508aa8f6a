"""MXFP4 weights as gpt-oss checkpoints have them: two 4-bit codes a byte, a power of two for each 32 inputs.

Called by `lean_gpt_oss` at load. OCP Microscaling Formats v1.0: elements E2M1, scales E8M0. On a GPU they stay as they
are, and products read them so; elsewhere they are dequantised, an expert at a time.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cohort.kernels import reference
from cohort.kernels.code_dtypes import E2M1, E8M0, MX_GROUP
from cohort.kernels.types import ExpertCodes

GROUP = MX_GROUP
"""Inputs that share a scale."""


def dequantized(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """[outputs, inputs] in `dtype` of blocks uint8 [outputs, inputs / 32, 16] and scales uint8 [outputs, inputs / 32].

    Exact in bfloat16 and float32 but for numbers below 2^-126.
    """
    codes = blocks.flatten(1).view(E2M1)
    return reference.coded_numbers(codes, scales.view(E8M0), None, GROUP).to(dtype)


def in_codes(blocks: Tensor, scales: Tensor) -> ExpertCodes:
    """The same memory as a product reads it, of blocks and scales of all experts: [experts, outputs, …]."""
    return ExpertCodes(blocks.flatten(2).view(E2M1), scales.view(E8M0), None, GROUP)
