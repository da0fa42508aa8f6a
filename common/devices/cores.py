"""The cores of this machine that a process may use, by its affinity and its container's limit."""

from __future__ import annotations

import os
from pathlib import Path


def own_cores() -> set[int]:
    """Return the cores this process may run on."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def usable_cores(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the number of cores this process may use: its affinity, and its container's CPU quota if there is one."""
    cores = len(own_cores())
    try:
        quota, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        if quota != "max":
            cores = min(cores, max(1, int(quota) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup v2: the affinity is all there is
    return cores
