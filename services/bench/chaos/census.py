"""All processes of a pipeline as the kernel counts them: memory, threads, descriptors by kind, shared memory.

The launcher and its descendants are looked at every few seconds; each life (one process id with one start time) is a
series of samples of its own. Reads /proc, changes nothing. Called by `soak` and `faults`.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

LAUNCHER = "launcher"
_PROC = Path("/proc")
_SYSTEM_V = _PROC / "sysvipc/shm"
_SHARED = "/dev/shm/"


class Life(msgspec.Struct, frozen=True):
    """One process from its start to its end. `name`: the instance, or `instance/module` of a helper of one."""

    name: str
    pid: int
    start_ticks: int


class Sample(msgspec.Struct, frozen=True):
    """Seconds since the start; bytes."""

    at_s: float
    rss_bytes: int
    threads: int
    descriptors: dict[str, int]


class _Stat(msgspec.Struct, frozen=True):
    parent: int
    start_ticks: int
    cpu_s: float


class RunFile(msgspec.Struct, frozen=True):
    """The part of `launcher.json` that is read here."""

    class Mark(msgspec.Struct, frozen=True):
        pid: int
        start_ticks: int

    launcher: Mark
    processes: dict[str, Mark]
    ready_urls: dict[str, str]


class Census:
    def __init__(self, run_folder: Path) -> None:
        self._run_file = run_folder / "launcher.json"
        self.series: dict[Life, list[Sample]] = {}
        self.mapped: set[str] = set()
        """Files in /dev/shm that any of them had mapped."""
        self.cpu_s: dict[Life, float] = {}

    def run_file(self) -> RunFile:
        return msgspec.json.decode(self._run_file.read_bytes(), type=RunFile)

    def living(self) -> dict[str, Life]:
        """Return the lives by name; of several helpers of one module all but the first have a number."""
        run = self.run_file()
        stats = dict(_stats())
        children: dict[int, list[int]] = {}
        for pid, stat in sorted(stats.items()):
            children.setdefault(stat.parent, []).append(pid)
        instances = {mark.pid: name for name, mark in run.processes.items()}
        found: dict[str, Life] = {}

        def add(pid: int, name: str) -> None:
            unique, number = name, 1
            while unique in found:
                number += 1
                unique = f"{name} {number}"
            found[unique] = Life(unique, pid, stats[pid].start_ticks)
            self.cpu_s[found[unique]] = stats[pid].cpu_s
            for child in children.get(pid, ()):
                helper = instances.get(child) or f"{name.partition('/')[0]}/{_module(child)}"
                add(child, helper)

        if run.launcher.pid in stats:
            add(run.launcher.pid, LAUNCHER)
        return found

    def sample(self, now_s: float, *, maps: bool) -> dict[str, Life]:
        """Sample each of them once; `maps`: also what they have mapped, which costs more."""
        living = self.living()
        for life in living.values():
            with contextlib.suppress(OSError, KeyError):  # it may end meanwhile
                self.series.setdefault(life, []).append(_sample(life.pid, now_s))
                if maps:
                    self.mapped |= set(_shared(life.pid))
        return living

    def leftovers(self) -> list[str]:
        """Return what is left of any life after the pipeline's end: processes, files in /dev/shm, System V segments."""
        pids = {life.pid for life in self.series}
        now = dict(_stats())
        found = [
            f"process {life.name} ({life.pid}) lives"
            for life in self.series
            if life.pid in now and now[life.pid].start_ticks == life.start_ticks
        ]
        found += [f"shared memory {path}" for path in sorted(self.mapped) if Path(path).exists()]
        with contextlib.suppress(OSError):
            for line in _SYSTEM_V.read_text().splitlines()[1:]:
                fields = line.split()
                if int(fields[4]) in pids:
                    found.append(f"System V segment {fields[1]} of {fields[3]} bytes, made by {fields[4]}")
        return found


def _stats() -> Iterator[tuple[int, _Stat]]:
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] not in "ZX":
                    cpu_s = (int(fields[11]) + int(fields[12])) * tick_s
                    yield int(entry.name), _Stat(int(fields[1]), int(fields[19]), cpu_s)


def _module(pid: int) -> str:
    with contextlib.suppress(OSError, ValueError):
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
        return words[words.index("-m") + 1].rpartition(".")[2]
    return "helper"


def _sample(pid: int, now_s: float) -> Sample:
    status = dict(line.split(":", 1) for line in (_PROC / str(pid) / "status").read_text().splitlines() if ":" in line)
    kinds: Counter[str] = Counter()
    for link in (_PROC / str(pid) / "fd").iterdir():
        with contextlib.suppress(OSError):
            kinds[_kind(os.readlink(link))] += 1
    return Sample(round(now_s, 2), _kib(status["VmRSS"]), int(status["Threads"]), dict(sorted(kinds.items())))


def _kib(text: str) -> int:
    return int(text.split()[0]) * 1024


def _kind(target: str) -> str:
    if target.startswith("/"):
        return "file"
    return target.removeprefix("anon_inode:").strip("[]").partition(":")[0]


def _shared(pid: int) -> Iterator[str]:
    for line in (_PROC / str(pid) / "maps").read_text().splitlines():
        _, mark, path = line.partition(_SHARED)
        if mark and not path.endswith(" (deleted)"):
            yield _SHARED + path
