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
import torch

from tests.e2e.equality.golden import Golden, golden_outputs
from tests.e2e.equality.test_golden import ask, compare
from tests.e2e.pipeline import Answer, Pipeline
from tests.e2e.tiny_models import llama, save
from tests.services.gateway.tiny_model import byte_level

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

STREAMS = 12
NEW_TOKENS = 200
GONE_S = 10.0
"""The longest to wait for a process's end; it takes milliseconds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("model")
    save(llama(), folder)
    byte_level(400).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def goldens(model: Path) -> list[Golden]:
    prompts = [[3 + (7 * index + 5 * place) % 390 for place in range(20 + index)] for index in range(STREAMS)]
    return golden_outputs(model, prompts, NEW_TOKENS)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Pipeline]:
    overrides = {
        "workers": [{"role": "prefill"}, {"role": "decode", "tensor_parallel": 2}],
        "engine": {"threads": 1},
        "kv": {"memory_bytes": 64 << 20},
    }
    made = Pipeline(tmp_path_factory.mktemp("ranks"), model, overrides, preset="disaggregated")
    made.held.add("decode-0")
    with made as running:
        yield running


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


@pytest.mark.parametrize("victim", ["rank 1", "rank 0"])
def test_a_killed_rank_costs_a_pause_and_nothing_else(pipeline: Pipeline, goldens: list[Golden], victim: str) -> None:
    pipeline.wait_ready()
    worker = pipeline.processes["decode-0"]
    (follower,) = ranks_of(worker.pid)

    async def disturb() -> list[Answer]:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
            with pipeline.hold("decode-0") as go_on:
                tasks = [asyncio.create_task(pipeline.complete(session, **ask(golden))) for golden in goldens]
                await asyncio.to_thread(pipeline.wait_for_requests, STREAMS)
                await asyncio.to_thread(go_on, 2 * STREAMS, STREAMS)
                assert not any(task.done() for task in tasks)
                os.kill(follower if victim == "rank 1" else worker.pid, signal.SIGKILL)
            await asyncio.to_thread(worker.wait, GONE_S)
            await asyncio.to_thread(wait_gone, [follower])
            pipeline.start("decode-0")
            return await asyncio.gather(*tasks)

    answers = asyncio.run(disturb())
    assert worker.returncode == (1 if victim == "rank 1" else -signal.SIGKILL)
    compare(goldens, answers)
    pipeline.wait_ready()
    pipeline.assert_nothing_left()
    compare(goldens, pipeline.complete_all([ask(golden) for golden in goldens]))


def test_a_worker_that_is_asked_to_end_takes_its_ranks_along(pipeline: Pipeline) -> None:
    pipeline.wait_ready()
    ranks = ranks_of(pipeline.processes["decode-0"].pid)
    assert ranks
    assert pipeline.terminate("decode-0") == 0
    wait_gone(ranks)
    pipeline.start("decode-0")
    pipeline.wait_ready()
