"""The memory that the engine keeps, and its machine: figures of this process for `cohort bench engine`."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from cohort import __version__
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.kernels.cpu import native
from cohort.services.bench.engine.report import Machine

_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16", "asimd", "sve", "bf16")


def rss_bytes() -> int:
    """Resident set of this process; 0 where /proc does not say."""
    return _proc_kib("/proc/self/status", "VmRSS:")


def available_bytes() -> int:
    """Memory of this host that a process can still have; 0 where /proc does not say."""
    return _proc_kib("/proc/meminfo", "MemAvailable:")


def weights_and_buffers(runner: ModelRunner) -> tuple[int, int]:
    """Bytes of the tensors the model's parts hold (layers, embedding, head), and of those it holds itself: buffers that
    every step writes anew, and small tables. A tensor under two names counts once."""
    model = runner._model
    direct = {name: value for name, value in vars(model).items() if isinstance(value, Tensor)}
    parts = [value for name, value in vars(model).items() if name not in direct]
    seen: set[int] = set()
    buffers = sum(_bytes(tensor, seen) for tensor in direct.values())
    return sum(_bytes(tensor, seen) for part in parts for tensor in _tensors(part, set())), buffers


def machine(threads: int, dtype: str, load_before: float) -> Machine:
    """Of this process, at the end of a measurement that began at `load_before`."""
    name, flags = _processor()
    return Machine(
        processor=name,
        features=[feature for feature in _FEATURES if feature in flags],
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        threads=threads,
        dtype=dtype,
        kernels=native.implementation(),
        cohort=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        omp_wait_policy=os.environ.get("OMP_WAIT_POLICY", ""),
        load_1m=[load_before, os.getloadavg()[0]],
    )


def _bytes(tensor: Tensor, seen: set[int]) -> int:
    if tensor.numel() == 0 or tensor.data_ptr() in seen:
        return 0
    seen.add(tensor.data_ptr())
    return tensor.numel() * tensor.element_size()


def _tensors(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Every tensor that can be reached through lists, slots and attributes of our own objects."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, torch.nn.Module):
        yield from value.parameters()
        yield from value.buffers()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item, seen)
    elif type(value).__module__.startswith("cohort."):
        names = [*getattr(type(value), "__slots__", ()), *getattr(value, "__dict__", {})]
        for name in names:
            yield from _tensors(getattr(value, name, None), seen)


def _proc_kib(path: str, key: str) -> int:
    try:
        with open(path, encoding="ascii") as lines:
            for line in lines:
                if line.startswith(key):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _processor() -> tuple[str, set[str]]:
    """Name and instruction sets of the first core."""
    name, flags = platform.processor() or platform.machine(), set[str]()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            for line in lines:
                key, _, value = line.partition(":")
                if key.strip() == "model name":
                    name = value.strip()
                elif key.strip().lower() in ("flags", "features"):
                    flags = set(value.split())
                elif not line.strip():
                    break
    except OSError:
        pass
    return name, flags
