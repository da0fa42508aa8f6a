"""The share of this machine's processors that other programs take: the usual reason why a pipeline is slow all at once.

Read from /proc by workers whose iterations come late and by `cohort doctor`. Time that a hypervisor takes away counts
as others'. Inside a container its own processes are all that can be told from others.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")


class _Reading(NamedTuple):
    """Clock ticks of all processors since boot, in all and busy; and of each process of the tree."""

    total: int
    busy: int
    own: dict[int, int]


class OtherPrograms:
    def __init__(self, root: int, proc: Path = PROC) -> None:
        """`root` and what descends from it is no other program; 0: everything is."""
        self._root = root
        self._proc = proc
        self._last: _Reading | None = None

    def share(self) -> float | None:
        """Return the share, 0 to 1, since the call before; None at the first one, or where /proc does not say."""
        before, now = self._last, _read(self._proc, self._root)
        self._last = now
        if before is None or now is None or now.total <= before.total:
            return None
        own = sum(ticks - before.own.get(pid, 0) for pid, ticks in now.own.items())
        return min(1.0, max(0.0, (now.busy - before.busy - own) / (now.total - before.total)))


def pipeline_root(proc: Path = PROC) -> int:
    """Return the first process of the pipeline that this one descends from: the launcher, or in a container itself."""
    pid = os.getpid()
    while (stat := _stat(proc, pid)) is not None and (parent := int(stat[1])) > 1:
        try:
            command = (proc / str(parent) / "cmdline").read_bytes()
        except OSError:
            break
        if b"python" not in command.split(b"\0")[0] or b"cohort" not in command:
            break
        pid = parent
    return pid


def _read(proc: Path, root: int) -> _Reading | None:
    try:
        ticks = [int(each) for each in (proc / "stat").read_text(encoding="ascii").split("\n", 1)[0].split()[1:9]]
    except (OSError, ValueError):
        return None
    if len(ticks) < 5:
        return None
    used: dict[int, int] = {}
    children: defaultdict[int, list[int]] = defaultdict(list)
    for name in os.listdir(proc) if root else ():
        if name.isdigit() and (stat := _stat(proc, int(name))) is not None:
            children[int(stat[1])].append(int(name))
            used[int(name)] = int(stat[11]) + int(stat[12])
    own, left = dict[int, int](), [root]
    while left:
        pid = left.pop()
        left += children.pop(pid, ())
        if pid in used:
            own[pid] = used[pid]
    return _Reading(sum(ticks), sum(ticks) - ticks[3] - ticks[4], own)


def _stat(proc: Path, pid: int) -> list[str] | None:
    """Return a process's fields behind its name: state, parent …; None if it is gone."""
    try:
        return (proc / str(pid) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
