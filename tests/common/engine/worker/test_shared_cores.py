"""Workers on the same cores: who computes at once gets a share of the threads, and no more than that."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.engine.worker.shared_cores import SharedCores

NAMES = ["decode-0", "decode-1", "prefill-0", "prefill-1"]


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@given(cores=st.integers(1, 8), threads=st.integers(1, 8), computing=st.sets(st.sampled_from(NAMES)))
def test_a_share_is_what_the_cores_give_each_that_computes(
    tmp_path_factory: pytest.TempPathFactory, cores: int, threads: int, computing: set[str]
) -> None:
    async def check() -> None:
        clock, file = Clock(), tmp_path_factory.mktemp("run") / "computing"
        workers = {name: SharedCores(file, name, threads=threads, cores=cores, now_s=clock) for name in NAMES}
        for name in computing:
            workers[name].begin()
        for name, worker in workers.items():
            others = len(computing - {name})
            assert worker.share() == (threads if not others else max(1, min(threads, cores // (others + 1))))
        clock.now_s += 10.0  # none has said so since: killed, stopped, or without a moment for its event loop
        assert all(worker.share() == threads for worker in workers.values())

    asyncio.run(check())


async def test_a_slot_holds_while_its_worker_computes_and_not_after(tmp_path: Path) -> None:
    clock = Clock()
    busy, other = (SharedCores(tmp_path / "c", name, threads=2, cores=2, now_s=clock) for name in NAMES[1:3])
    with busy.computing(), busy.computing():
        for _ in range(4):
            clock.now_s += 0.2
            await asyncio.sleep(0.12)
            assert (busy.share(), other.share()) == (2, 1)
    await asyncio.sleep(0.12)
    assert other.share() == 2


def test_a_killed_worker_takes_nobodys_cores(tmp_path: Path) -> None:
    words = (
        "import asyncio, pathlib, sys\n"
        "from cohort.common.engine.worker.shared_cores import SharedCores\n"
        "async def run():\n"
        "    with SharedCores(pathlib.Path(sys.argv[1]), 'decode-0', threads=2, cores=2).computing():\n"
        "        print('computes', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(run())\n"
    )
    mine = SharedCores(tmp_path / "c", "prefill-0", threads=2, cores=2)
    process = subprocess.Popen([sys.executable, "-c", words, str(tmp_path / "c")], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"computes\n"
        wait_for_share(mine, 1)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        wait_for_share(mine, 2)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def wait_for_share(cores: SharedCores, threads: int) -> None:
    """However late a loaded machine lets the other say so."""
    deadline_s = time.monotonic() + 30.0
    while cores.share() != threads:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_slot_from_before_the_machine_started_anew_takes_nobodys_cores(tmp_path: Path) -> None:
    async def fill() -> None:
        clock = Clock()
        clock.now_s = 9000.0
        SharedCores(tmp_path / "c", "decode-0", threads=2, cores=2, now_s=clock).begin()

    asyncio.run(fill())
    assert SharedCores(tmp_path / "c", "prefill-0", threads=2, cores=2, now_s=Clock()).share() == 2
