"""What the device of a worker is called in the cluster, so that workers that share one are known to.

Called once by `worker_process`. The name holds no matter how often the worker restarts, and is the same in every
container of a host: the running system's boot id, then the GPU's own id, or the cores this process may use. Workers on
disjoint cores share nothing; those whose cores overlap in part do not count as sharing either, nor do those that have
fewer threads than cores.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Collection
from pathlib import Path

import torch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def device_name(device: torch.device, cores: Collection[int], *, threads: int, instance: str) -> str:
    """HOST/cpu:0-7 or HOST/GPU-<uuid>; HOST is the start of its boot id, or its name where there is none. A worker with
    fewer threads than cores leaves the others to other workers: its part of them is a device of its own, named after
    the instance."""
    if device.type == "cuda":
        return f"{_host()}/GPU-{torch.cuda.get_device_properties(device).uuid}"
    part = f"/{instance}" if threads < len(cores) else ""
    return f"{_host()}/{device.type}:{ranges(cores)}{part}"


def ranges(numbers: Collection[int]) -> str:
    """{0, 1, 2, 5} as 0-2,5."""
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in found)


def own_cores() -> set[int]:
    """The cores this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def _host() -> str:
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()[:8]
    except OSError:
        return socket.gethostname()
