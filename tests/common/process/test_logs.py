from __future__ import annotations

import asyncio
import gc
import io
import json
import logging
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from cohort.common.config import LoggingConfig
from cohort.common.process.logs import configure_logging, log_loop_errors


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    yield
    root.handlers[:], root.level = handlers, level
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
    structlog.reset_defaults()


def configured(level: str = "info", format_: str = "json") -> tuple[structlog.stdlib.BoundLogger, io.StringIO]:
    stream = io.StringIO()
    config = LoggingConfig(level=level, format=format_)  # type: ignore[arg-type]
    return configure_logging(config, service="gateway", instance="gw-1", stream=stream), stream


def events(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_names_process_time_and_level() -> None:
    log, stream = configured()
    log.info("placed", instances=["prefill-0"], queued_s=0.25)
    (event,) = events(stream)
    timestamp = event.pop("timestamp")
    assert timestamp.endswith("Z") and timestamp[10] == "T"
    assert event == {
        "event": "placed",
        "level": "info",
        "logger": "cohort.gateway",
        "service": "gateway",
        "instance": "gw-1",
        "instances": ["prefill-0"],
        "queued_s": 0.25,
    }


def test_a_field_called_instance_is_not_overwritten() -> None:
    log, stream = configured()
    log.info("worker dead", instance="decode-0")
    assert events(stream)[0]["instance"] == "decode-0"


def test_level_filters() -> None:
    log, stream = configured("warning")
    log.info("hidden")
    log.warning("shown")
    assert [event["event"] for event in events(stream)] == ["shown"]


async def test_request_scope_follows_its_tasks_and_ends() -> None:
    log, stream = configured()

    async def work() -> None:
        log.info("inside a task")
        logging.getLogger("some.library").warning("inside %s", "a library")

    with structlog.contextvars.bound_contextvars(request_id="req-1"):
        await asyncio.create_task(work())
    log.info("after")
    assert [event.get("request_id") for event in events(stream)] == ["req-1", "req-1", None]


def test_standard_logging_takes_the_same_way() -> None:
    _, stream = configured()
    logging.getLogger("aiohttp.server").error("cannot %s", "serve", exc_info=ValueError("why"))
    logging.getLogger("aiohttp.access").info("GET / 200")
    (event,) = events(stream)
    assert (event["event"], event["logger"], event["service"]) == ("cannot serve", "aiohttp.server", "gateway")
    assert "ValueError: why" in event["exception"]


def test_values_beyond_json_are_written_by_their_representation() -> None:
    log, stream = configured()
    log.info("odd", value={1, 2}, thing=object, path=io.StringIO)
    assert events(stream)[0]["value"] in ([1, 2], [2, 1], "{1, 2}")


def test_console_lines_are_for_people() -> None:
    log, stream = configured(format_="console")
    log.info("ready", port=8000)
    assert "ready" in stream.getvalue() and "port=8000" in stream.getvalue() and "\x1b" not in stream.getvalue()


def test_a_broken_stream_does_not_break_the_service(capsys: pytest.CaptureFixture[str]) -> None:
    log, stream = configured()
    other = io.StringIO()
    logging.getLogger().addHandler(logging.StreamHandler(other))
    stream.close()
    log.error("nobody reads this")
    assert "nobody reads this" in other.getvalue(), "who still listens hears of it"
    assert capsys.readouterr() == ("", ""), "and no traceback of the logging itself appears"


async def test_lost_task_errors_are_logged() -> None:
    log, stream = configured()
    log_loop_errors(asyncio.get_running_loop(), log)

    async def fail() -> None:
        raise RuntimeError("lost")

    task = asyncio.create_task(fail(), name="loser")
    await asyncio.wait((task,))
    del task
    gc.collect()
    (event,) = events(stream)
    assert "never retrieved" in event["event"] and "RuntimeError: lost" in event["exception"]
    assert "loser" in event["future"]


def test_lost_thread_errors_are_logged() -> None:
    _, stream = configured()

    def fail() -> None:
        raise RuntimeError("lost in a thread")

    thread = threading.Thread(target=fail, name="worker-thread")
    thread.start()
    thread.join()
    (event,) = events(stream)
    assert event["thread"] == "worker-thread" and "lost in a thread" in event["exception"]
