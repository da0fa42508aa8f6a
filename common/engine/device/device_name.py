"""The device and dtype that `auto` stands for, and a device's name in the cluster, which shows who shares it.

Called by `worker_process` and the model runner. The name holds no matter how often the worker restarts, and is the same
in every container of a host: the running system's boot id, then the GPU's own id, or the cores this process may use.
Workers on disjoint cores share nothing; those whose cores overlap in part do not count as sharing either, nor do those
that have fewer threads than cores.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from pathlib import Path

import torch

from cohort.common.errors import ConfigError

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def device_name(device: torch.device, cores: Collection[int], *, threads: int, instance: str) -> str:
    """Return HOST/cpu:0-7 or HOST/GPU-<uuid>; HOST is the start of its boot id, or its name where there is none. A
    worker with fewer threads than cores leaves the others to other workers: its part of them is a device of its own,
    named after the instance."""
    if device.type == "cuda":
        return f"{_host()}/GPU-{torch.cuda.get_device_properties(device).uuid}"
    part = f"/{instance}" if threads < len(cores) else ""
    return f"{_host()}/{device.type}:{ranges(cores)}{part}"


def ranges(numbers: Collection[int]) -> str:
    """Format {0, 1, 2, 5} as 0-2,5."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def _host() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()[:8]
    except OSError:
        return socket.gethostname()


def resolve_device(device: str) -> torch.device:
    """Return the device of this name; "auto" is the GPU where there is one."""
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
    """Return the dtype of this name; "auto" is bfloat16 where the device computes in it, else float32."""
    if dtype == "auto":
        return "bfloat16" if device.type == "cuda" or native_bfloat16() else "float32"
    if dtype not in TORCH_DTYPES:
        raise ConfigError(f"model.dtype: {dtype!r} is none of auto, {', '.join(TORCH_DTYPES)}")
    return dtype


def native_bfloat16() -> bool:
    """Return whether this processor multiplies bfloat16 itself (AMX or AVX512-BF16); else it is slower than float32."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()) and (
        torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()
    )
