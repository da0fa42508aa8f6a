"""A timeline of a process that computes, asked for by a signal."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import structlog
import torch
from structlog.testing import capture_logs

from cohort.common.engine.worker.timeline import Timeline, timeline_file


@pytest.fixture
def engine() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


async def record(file: Path, engine: ThreadPoolExecutor) -> None:
    """Signal this process, and let the engine thread compute until the file is there."""
    timeline = Timeline(file, engine, structlog.get_logger("test"), on_gpu=False)
    loop = asyncio.get_running_loop()
    timeline.listen(loop)
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        while not await asyncio.to_thread(file.exists):
            await loop.run_in_executor(engine, torch.mm, torch.rand(32, 32), torch.rand(32, 32))
            await asyncio.sleep(0.001)
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)


def test_a_signal_writes_what_the_engine_thread_computes(tmp_path: Path, engine: ThreadPoolExecutor) -> None:
    file = timeline_file(tmp_path, "worker-0")
    asyncio.run(asyncio.wait_for(record(file, engine), 120))
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    products = [event for event in events if event.get("name") == "aten::mm"]
    assert len({event["tid"] for event in products}) == 1 and len(products) > 1
    assert list(tmp_path.iterdir()) == [file]


def test_one_at_a_time(tmp_path: Path, engine: ThreadPoolExecutor) -> None:
    timeline = Timeline(tmp_path / "t.json.gz", engine, structlog.get_logger("test"), on_gpu=False)

    async def twice() -> None:
        timeline.begin()
        timeline.begin()
        assert timeline._recording is not None
        await timeline._recording

    with capture_logs() as said:
        asyncio.run(twice())
    assert [each["event"] for each in said] == ["no timeline: the one before is not written yet", "timeline written"]


def test_a_folder_that_is_gone_ends_nothing(tmp_path: Path, engine: ThreadPoolExecutor) -> None:
    timeline = Timeline(tmp_path / "absent" / "t.json.gz", engine, structlog.get_logger("test"), on_gpu=False)

    async def once() -> None:
        timeline.begin()
        assert timeline._recording is not None
        await timeline._recording

    with capture_logs() as said:
        asyncio.run(once())
    assert [each["event"] for each in said] == ["no timeline"]
