"""A rank of a worker dies: the whole worker ends with it, nothing of it is left, and streams go on elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.chaos.conftest import held, repaired, whole
from tests.chaos.streams import DECODE
from tests.e2e.equality.golden import Golden, golden_outputs
from tests.e2e.equality.test_golden import ask, compare
from tests.e2e.pipeline import Answer, Pipeline
from tests.examples import another_of_its_kind

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

STREAMS = 12
NEW_TOKENS = 40
GONE_S = 10.0
"""The longest to wait for a process's end; it takes milliseconds."""


@pytest.fixture(scope="module")
def goldens(tiny_model: Path) -> list[Golden]:
    prompts = [[3 + (7 * index + 5 * place) % 390 for place in range(20 + index)] for index in range(STREAMS)]
    return golden_outputs(tiny_model, prompts, NEW_TOKENS)


@pytest.fixture(scope="module")
def divided(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Pipeline]:
    workers = [{"role": "prefill"}, {"role": "decode", "tensor_parallel": 2}]
    with held(tmp_path_factory.mktemp("ranks"), tiny_model, workers=workers) as made:
        yield made


@pytest.fixture
def pipeline(divided: Pipeline) -> Pipeline:
    return repaired(divided)


def ranks_of(pid: int) -> list[int]:
    """The worker's other ranks."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if parent == pid and b"cohort.common.engine.worker.follower_process" in words:
                found.append(int(entry.name))
    return found


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + GONE_S
    while left := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Not a zombie either that waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("victim", ["rank 1", pytest.param("rank 0", marks=another_of_its_kind())])
def test_a_killed_rank_costs_a_pause_and_nothing_else(pipeline: Pipeline, goldens: list[Golden], victim: str) -> None:
    worker = pipeline.processes[DECODE]
    (follower,) = ranks_of(worker.pid)

    async def disturb() -> list[Answer]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            with pipeline.hold(DECODE) as go_on:
                tasks = [asyncio.create_task(pipeline.complete(session, **ask(golden))) for golden in goldens]
                await asyncio.to_thread(pipeline.wait_at, DECODE, STREAMS)
                await asyncio.to_thread(go_on, 2 * STREAMS, STREAMS)
                assert not any(task.done() for task in tasks)
                os.kill(follower if victim == "rank 1" else worker.pid, signal.SIGKILL)
            await asyncio.to_thread(worker.wait, GONE_S)
            await asyncio.to_thread(wait_gone, [follower])
            pipeline.start(DECODE)
            return await asyncio.gather(*tasks)

    answers = asyncio.run(disturb())
    assert worker.returncode == (1 if victim == "rank 1" else -signal.SIGKILL)
    compare(goldens, answers)
    whole(pipeline)
    pipeline.assert_nothing_left()
    compare(goldens, pipeline.complete_all([ask(golden) for golden in goldens]))


def test_a_worker_that_is_asked_to_end_takes_its_ranks_along(pipeline: Pipeline) -> None:
    ranks = ranks_of(pipeline.processes[DECODE].pid)
    assert ranks
    assert pipeline.terminate(DECODE) == 0
    wait_gone(ranks)
