"""Log levels that change while a process runs: by the file it is left, and by the bare signal."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
from pathlib import Path
from typing import Any

import structlog

from cohort.common.config import LoggingConfig
from cohort.common.process.log_levels import level_file, listen_for_levels, request_level
from cohort.common.process.logs import configure_logging, log_level
from tests.common.process.test_logs import restored as restored


def started(tmp_path: Path, level: str = "info") -> tuple[structlog.stdlib.BoundLogger, io.StringIO]:
    stream = io.StringIO()
    config = LoggingConfig(level=level, format="json")  # type: ignore[arg-type]
    log = configure_logging(config, service="gateway", instance="gateway", stream=stream)
    listen_for_levels(tmp_path, "gateway", config.level, log, asyncio.get_running_loop())
    return log, stream


async def signalled(until: str) -> None:
    os.kill(os.getpid(), signal.SIGUSR2)
    async with asyncio.timeout(5):
        while log_level() != until:  # noqa: ASYNC110 -- a signal has no other sign
            await asyncio.sleep(0.005)


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_the_file_names_the_level_and_is_taken(tmp_path: Path) -> None:
    log, stream = started(tmp_path)
    log.debug("unseen")
    request_level(tmp_path, "gateway", "debug")
    await signalled("debug")
    log.debug("seen", tokens=3)
    assert not level_file(tmp_path, "gateway").exists()
    changed, seen = events(stream)
    assert (changed["event"], changed["before"], changed["now"]) == ("log level changed", "info", "debug")
    assert (seen["event"], seen["tokens"]) == ("seen", 3)
    # A logger of the standard library follows, and the ones that are quiet below warnings stay so.
    request_level(tmp_path, "gateway", "error")
    await signalled("error")
    logging.getLogger("aiohttp.access").warning("unseen")
    log.warning("unseen")
    assert [event["event"] for event in events(stream)] == ["log level changed", "seen"]


async def test_the_bare_signal_goes_to_debug_and_back(tmp_path: Path) -> None:
    started(tmp_path, "warning")
    await signalled("debug")
    await signalled("warning")


async def test_what_is_no_level_changes_nothing(tmp_path: Path) -> None:
    _, stream = started(tmp_path)
    level_file(tmp_path, "gateway").write_text("loud")
    os.kill(os.getpid(), signal.SIGUSR2)
    async with asyncio.timeout(5):
        while not events(stream):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert log_level() == "info"
    assert events(stream)[0]["asked"] == "loud"


async def test_a_level_meant_for_an_earlier_process_is_void(tmp_path: Path) -> None:
    request_level(tmp_path, "gateway", "error")
    started(tmp_path)
    assert not level_file(tmp_path, "gateway").exists()
    await signalled("debug")  # as without a file
