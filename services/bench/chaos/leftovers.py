"""What a soak has left behind: in the processes once all clients are gone, and on the machine once they ended too.

The end is compared with a quiet moment before the traffic: the same threads, descriptors, tasks and helper processes,
no request, block, lease or stream held. A process may have a few descriptors more, which a pool of connections or a
database opens when it first needs them (`SPARE`). Pure but for reading folders. Called by `soak`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cohort.services.bench.chaos.census import Sample

SPARE = {"socket": 2, "file": 2, "pipe": 0, "eventpoll": 0, "eventfd": 0}
SPARE_THREADS = 8
"""Pools of threads start them when they are first wanted, the event loop's own at most six on two cores."""
SPARE_TASKS = 2
HELD = {
    "worker": ("held_blocks", "leases", "running", "waiting", "awaiting_kv", "parked", "quarantined_blocks"),
    "manager": ("waiting", "live"),
    "gateway": ("requests_running", "requests_waiting", "open_streams"),
}
_LOGS = "logs"
_RUN_FILES = ("launcher.lock", "resolved.yaml", _LOGS)
_STATE_FILES = ("batches", "streams.sqlite3", "usage.sqlite3", "lengths.npz", "learned", "overlay.yaml")
_BATCH_FILES = ("batches.sqlite", "responses.sqlite", "lock", "runner", "files")
_SQLITE = ("", "-wal", "-shm")


class Moment(msgspec.Struct, frozen=True):
    """All processes at one quiet time: their samples by name, and their own stats by instance."""

    samples: dict[str, Sample]
    stats: dict[str, dict[str, float]]


def held(stats: Mapping[str, Mapping[str, float]], workers: frozenset[str]) -> list[str]:
    """What any process holds for a request."""
    found = []
    for name, each in stats.items():
        for stat in HELD["worker" if name in workers else name] if name in workers or name in HELD else ():
            if each.get(stat, 0):
                found.append(f"{name}: {stat} = {each[stat]:g}")
    for name in sorted(workers - stats.keys()):
        found.append(f"{name}: is not there")
    for name in sorted(workers & stats.keys()):
        each = stats[name]
        if "total_blocks" in each and each["free_blocks"] + each.get("cached_blocks", 0.0) < each["total_blocks"]:
            free, cached = each["free_blocks"], each.get("cached_blocks", 0.0)
            found.append(f"{name}: {free:g} blocks free and {cached:g} cached of {each['total_blocks']:g}")
    return found


def grown(start: Moment, end: Moment) -> list[str]:
    """Threads, descriptors, tasks and helpers beyond those of the start."""
    found = []
    for name, now in end.samples.items():
        before = start.samples.get(name)
        if before is None:
            found.append(f"{name}: a process that was not there at the start")
            continue
        if now.threads > before.threads + SPARE_THREADS:
            found.append(f"{name}: {now.threads} threads, {before.threads} at the start")
        for kind, count in now.descriptors.items():
            if count > before.descriptors.get(kind, 0) + SPARE.get(kind, 0):
                found.append(f"{name}: {count} descriptors ({kind}), {before.descriptors.get(kind, 0)} at the start")
    for name in start.samples.keys() - end.samples.keys():
        if "/" not in name:
            found.append(f"{name}: is gone")
    for name, stats in end.stats.items():
        tasks, former = stats.get("asyncio_tasks", 0.0), start.stats.get(name, {}).get("asyncio_tasks", 0.0)
        if tasks > former + SPARE_TASKS:
            found.append(f"{name}: {tasks:g} asyncio tasks, {former:g} at the start")
    return found


def unknown_files(run_folder: Path, state_folder: Path, temporary: Path) -> list[str]:
    """Files that the pipeline left once it had ended, other than those that it keeps."""
    found = [str(path) for path in _beside(run_folder, _RUN_FILES) if not path.name.endswith(".sock.lock")]
    found += [str(path) for path in (run_folder / _LOGS).glob("*") if not path.name.endswith((".log", ".log.1"))]
    found += map(str, _beside(state_folder, _STATE_FILES))
    found += map(str, _beside(state_folder / "batches", _BATCH_FILES))
    found += map(str, (state_folder / "batches/files").glob("*"))
    found += map(str, temporary.iterdir())
    return found


def _beside(folder: Path, known: tuple[str, ...]) -> Iterator[Path]:
    names = {name + end for name in known for end in _SQLITE}
    return (path for path in folder.iterdir() if path.name not in names)


def stats_of(state: Any) -> dict[str, dict[str, float]]:
    """By instance, of the processes that the monitor hears of."""
    return {each["instance"]: each["stats"] for each in state["processes"] if each["status"] == "up"}
