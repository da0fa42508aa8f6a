"""Processes as the kernel counts them: the launcher of a pipeline, its instances, their helpers, what they leave."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cohort.services.bench.chaos.census import Census, Life

SHARED = Path(f"/dev/shm/cohort-census-test-{os.getpid()}")
_INSTANCE = f"""
import mmap, subprocess, sys, time
helper = subprocess.Popen([sys.executable, "-m", "timeit", "-s", "import time", "-n", "1", "-r", "1", "time.sleep(60)"])
shared = open("{SHARED}", "w+b")
shared.truncate(4096)
mapped = mmap.mmap(shared.fileno(), 4096)
print(helper.pid, flush=True)
time.sleep(60)
"""
_LAUNCHER = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {_INSTANCE!r}], stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), flush=True)
time.sleep(60)
"""


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[tuple[Path, list[int]]]:
    """A run folder, and the process ids of a launcher, an instance and its helper."""
    with subprocess.Popen([sys.executable, "-c", _LAUNCHER], stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        pids = [launcher.pid, *map(int, launcher.stdout.readline().split())]
        marks = {
            "launcher": {"pid": pids[0], "start_ticks": 0},
            "processes": {"gateway": {"pid": pids[1], "start_ticks": 0}},
        }
        (tmp_path / "launcher.json").write_text(json.dumps({**marks, "ready_urls": {}, "name": "x"}))
        try:
            yield tmp_path, pids
        finally:
            for pid in reversed(pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
            SHARED.unlink(missing_ok=True)


def test_names_and_samples_of_a_tree(tree: tuple[Path, list[int]]) -> None:
    folder, pids = tree
    census = Census(folder)
    deadline_s = time.monotonic() + 20
    while "gateway/timeit" not in census.living():  # between fork and exec it has another name
        assert time.monotonic() < deadline_s
    living = census.sample(1.0, maps=True)
    assert {name: life.pid for name, life in living.items()} == dict(
        zip(["launcher", "gateway", "gateway/timeit"], pids, strict=True)
    )
    sample = census.series[living["gateway"]][0]
    assert sample.rss_bytes > 1 << 20
    assert sample.threads == 1 and sample.descriptors["file"] >= 1
    assert census.mapped == {str(SHARED)}


def test_what_is_left(tree: tuple[Path, list[int]]) -> None:
    folder, pids = tree
    census = Census(folder)
    census.sample(1.0, maps=True)
    assert any(str(pids[1]) in found for found in census.leftovers())
    for pid in pids:
        os.kill(pid, 9)
    census.series = {Life("gateway", pids[1], 0): []}  # its process id may be another's by now
    assert census.leftovers() == [f"shared memory {SHARED}"]
    SHARED.unlink()
    assert census.leftovers() == []
