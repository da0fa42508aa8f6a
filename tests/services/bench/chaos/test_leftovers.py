"""What processes hold at the end, what has grown, and which files do not belong."""

from __future__ import annotations

from pathlib import Path

from cohort.services.bench.chaos.census import Sample
from cohort.services.bench.chaos.soak import Moment, grown, held, unknown_files

WORKERS = frozenset({"decode-0"})
FREE = {"total_blocks": 100.0, "free_blocks": 60.0, "cached_blocks": 40.0, "held_blocks": 0.0, "leases": 0.0}


def sample(threads: int = 3, **descriptors: int) -> Sample:
    return Sample(0.0, 1, threads, descriptors)


def test_nothing_is_held() -> None:
    stats = {"decode-0": FREE, "manager": {"waiting": 0.0, "live": 0.0}, "gateway": {"open_streams": 0.0}}
    assert held(stats, WORKERS) == []


def test_blocks_leases_requests_and_missing_workers_are_named() -> None:
    stats = {"decode-0": {**FREE, "leases": 1.0, "free_blocks": 59.0}, "manager": {"live": 2.0}}
    assert held(stats, WORKERS | {"prefill-0"}) == [
        "decode-0: leases = 1",
        "manager: live = 2",
        "prefill-0: is not there",
        "decode-0: 59 blocks free and 40 cached of 100",
    ]


def test_growth_beyond_what_is_spare_is_named() -> None:
    start = Moment({"gateway": sample(socket=10, pipe=2), "manager": sample()}, {"gateway": {"asyncio_tasks": 5.0}})
    same = Moment({"gateway": sample(socket=12, pipe=2), "manager": sample()}, {"gateway": {"asyncio_tasks": 6.0}})
    assert grown(start, same) == []
    more = Moment(
        {"gateway": sample(12, socket=13, pipe=3), "gateway/helper 2": sample()}, {"gateway": {"asyncio_tasks": 50.0}}
    )
    assert grown(start, more) == [
        "gateway: 12 threads, 3 at the start",
        "gateway: 13 descriptors (socket), 10 at the start",
        "gateway: 3 descriptors (pipe), 2 at the start",
        "gateway/helper 2: a process that was not there at the start",
        "manager: is gone",
        "gateway: 50 asyncio tasks, 5 at the start",
    ]


def test_only_files_that_are_not_kept_are_named(tmp_path: Path) -> None:
    run, state, temporary = tmp_path / "run", tmp_path / "state", tmp_path / "tmp"
    for folder in (run / "logs", state / "batches/8000/files", state / "learned", temporary):
        folder.mkdir(parents=True)
    kept = [run / "launcher.lock", run / "resolved.yaml", run / "gateway.sock.lock", run / "logs/gateway.log.1"]
    kept += [state / "streams.sqlite3-wal", state / "batches/8000/batches.sqlite", state / "batches/8000/lock"]
    left = [run / "gateway.sock", run / "logs/core", state / "batches/8000/files/file-1", temporary / "tmp123"]
    for path in [*kept, *left]:
        path.touch()
    assert unknown_files(run, state, temporary) == [str(path) for path in left]
