"""The memory that this host still gives a process, and what its processor computes in; from the kernel's files.

Called before weights are read, by the launcher and by workers on a processor. Never raises: what cannot be read is not
known.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cohort.common.devices.inventory import HOST, Sources, meminfo_bytes

_NO_LIMIT = 1 << 60  # version 1 of cgroups writes a number of this size where there is none
_BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})


def available_bytes(sources: Sources = HOST) -> int:
    """Return the bytes that can be allocated now without swapping, by host and containers' limits; 0 if not known."""
    host = meminfo_bytes(sources, "MemAvailable")
    known = [*([host] if host else []), *(max(0, free) for free in _free_in_cgroups(sources))]
    return min(known, default=0)


def computes_bfloat16(sources: Sources = HOST) -> bool:
    """Return whether the processor multiplies bfloat16 itself; else its products are in float32."""
    try:
        for line in (sources.proc / "cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("flags"):
                return not _BFLOAT16_FLAGS.isdisjoint(line.partition(":")[2].split())
    except OSError:
        pass
    return False


def _free_in_cgroups(sources: Sources) -> Iterator[int]:
    """Yield what this process's group and every group around it have left, in either version of cgroups."""
    try:
        lines = (sources.proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            names = ("memory.max", "memory.current", "inactive_file")
            yield from _free(sources.cgroup, path, *names)
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _free(sources.cgroup / "memory", path, *names)


def _free(base: Path, path: str, limit_name: str, used_name: str, cache_name: str) -> Iterator[int]:
    """Yield what is left of each limit. Inactive pages of files count as free: the kernel drops them first."""
    folder = base / path.strip("/")
    for group in (folder, *folder.parents):
        if group != base and base not in group.parents:
            return
        try:
            limit = int((group / limit_name).read_text(encoding="ascii"))
            used = int((group / used_name).read_text(encoding="ascii"))
            stat = (group / "memory.stat").read_text(encoding="ascii").split()
        except (OSError, ValueError):  # no such file, or "max"
            continue
        cache = int(stat[stat.index(cache_name) + 1]) if cache_name in stat else 0
        if limit < _NO_LIMIT:
            yield limit - used + cache
