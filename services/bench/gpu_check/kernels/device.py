"""Section: installed packages, the device, and the rates that every bound is made of, where nothing runs beside."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil

import torch

from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.context import Check

_PACKAGES = (
    *("torch", "triton", "transformers", "flash-attn-4", "flash-attn", "numpy", "pyzmq", "msgspec", "structlog"),
    *("ucxx-cu13", "ucxx-cu12", "libucx-cu13", "libucx-cu12"),
)
_TOOLS = ("gcc", "c++", "compute-sanitizer", "nvidia-smi", "nsys")


def run(check: Check) -> None:
    check.guard.item("packages", lambda: _packages(check), 10)
    check.guard.item("device", lambda: _device(check), 10)
    if not check.alone:
        return
    check.guard.item("rates", lambda: _rates(check), 15)
    check.guard.item("page-locked copies", lambda: _page_locked(check), 10)


def _packages(check: Check) -> None:
    versions = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"no {package}")
    check.found.add_note("packages", ", ".join(versions))
    check.found.add_note("tools", ", ".join(name if shutil.which(name) else f"no {name}" for name in _TOOLS))


def _device(check: Check) -> None:
    if check.device.type != "cuda":
        check.found.add_note("device", f"a processor, {torch.get_num_threads()} threads")
        return
    properties = torch.cuda.get_device_properties(check.device)
    free, total = torch.cuda.mem_get_info(check.device)
    check.found.add_note(
        "device",
        f"{properties.name}, {properties.multi_processor_count} multiprocessors, capability "
        f"{properties.major}.{properties.minor}, {total >> 20} MiB, {free >> 20} free, CUDA {torch.version.cuda}",
    )


def _rates(check: Check) -> None:
    found, ceilings = check.found, check.ceilings()
    found.measured("copy, read + written", ceilings.copy / 1e12, "TB/s")
    found.measured("read alone", ceilings.read / 1e12, "TB/s")
    found.measured("read of copy", ceilings.read / ceilings.copy, "x")
    found.measured(f"{check.dtype_name} products", ceilings.matrix / 1e12, "TFLOP/s")
    small = rates.copy_bytes_per_s(check.device, (256 << 20) if check.real else 1 << 16) / 2
    found.measured("copy of 256 MiB, payload", small / 1e12, "TB/s")


def _page_locked(check: Check) -> None:
    size = (256 << 20) if check.real else 1 << 16
    host = torch.empty(size, dtype=torch.uint8, pin_memory=check.device.type == "cuda")
    on_device = rates.random_bytes(size, check.device)
    for name, call in (
        ("page-locked memory to device", lambda: on_device.copy_(host, non_blocking=True)),
        ("device to page-locked memory", lambda: host.copy_(on_device, non_blocking=True)),
    ):
        check.found.measured(name, size / rates.seconds(call, check.device) / 1e9, "GB/s")
