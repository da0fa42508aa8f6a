"""The device and the type of numbers that `auto` stands for here.

Called by the model runner and by who sizes its cache.
"""

from __future__ import annotations

import torch

from cohort.common.engine.weights.linear import native_bfloat16
from cohort.common.errors import ConfigError

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def resolve_device(device: str) -> torch.device:
    """ "auto" is the GPU where there is one."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"engine.device: {device!r} is no device; use auto, cpu, cuda or cuda:N") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"engine.device: {device!r}, but this torch finds no CUDA device; use auto or cpu")
    return resolved


def resolve_dtype(dtype: str, device: torch.device) -> str:
    """ "auto" is bfloat16 where the device computes in it, else float32."""
    if dtype == "auto":
        return "bfloat16" if device.type == "cuda" or native_bfloat16() else "float32"
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"model.dtype: {dtype!r} is none of auto, {', '.join(TORCH_DTYPES)}")
    return dtype
