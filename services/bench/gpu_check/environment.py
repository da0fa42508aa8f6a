"""Section: installed packages, the C++ kernels built, and the device's own rates."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys

import torch

from cohort.common.paths import cache_dir
from cohort.services.bench.gpu_check import rates
from cohort.services.bench.gpu_check.context import Check
from cohort.services.bench.gpu_check.report import Row

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "flash-attn",
    "ucxx-cu13",
    "ucxx-cu12",
    "libucx-cu13",
    "libucx-cu12",
    "pyzmq",
    "msgspec",
    "structlog",
    "numpy",
)
_BUILD_S = 90


def run(check: Check) -> None:
    found, device = check.found, check.device
    versions = []
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    versions.insert(0, f"Python {platform.python_version()}")
    found.add(Row(section=found.section, name="packages", note=", ".join(versions)))
    if check.real:
        properties = torch.cuda.get_device_properties(device)
        free, total = torch.cuda.mem_get_info(device)
        found.add(
            Row(
                section=found.section,
                name="device",
                note=f"{properties.name}, {properties.multi_processor_count} multiprocessors, capability "
                f"{properties.major}.{properties.minor}, {total >> 20} MiB, {free >> 20} free, "
                f"CUDA {torch.version.cuda}",
            )
        )
    problem = _build_host_kernels()
    found.add(
        Row(
            section=found.section,
            name="C++ kernels (host side)",
            verdict="info" if problem else "pass",
            note=f"not built, the reference serves: {problem}" if problem else "",
        )
    )
    size = 4 << 30 if check.real else 1 << 20
    found.measured("device copy, read + written", rates.copy_bytes_per_s(device, size) / 1e12, "TB/s")
    found.measured(
        "device copy of 256 MB, payload",
        rates.copy_bytes_per_s(device, (256 << 20) if check.real else 1 << 16) / 2e12,
        "TB/s",
    )
    side = 8192 if check.real else 128
    found.measured(
        f"matrix product {side}³ {str(check.dtype).removeprefix('torch.')}",
        rates.matrix_operations_per_s(device, side, check.dtype) / 1e12,
        "TFLOP/s",
    )
    host = torch.empty(size // 16, dtype=torch.uint8, pin_memory=check.real)
    there = rates.random_bytes(size // 16, device)
    for name, call in (
        ("page-locked memory to device", lambda: there.copy_(host, non_blocking=True)),
        ("device to page-locked memory", lambda: host.copy_(there, non_blocking=True)),
    ):
        found.measured(name, len(host) / rates.seconds(call, device) / 1e9, "GB/s")


def _build_host_kernels() -> str:
    """Why they could not be built; "" if they were. Here only copies of single slots to and from the host use them."""
    try:
        built = subprocess.run(
            [sys.executable, "-P", "-m", "cohort.kernels.build", str(cache_dir())],
            capture_output=True,
            text=True,
            check=False,
            timeout=_BUILD_S,
        )
    except subprocess.TimeoutExpired:
        return f"not done after {_BUILD_S} s"
    last = (built.stderr or built.stdout).strip().splitlines() or ["no word from the compiler"]
    return "" if built.returncode == 0 else last[-1]
