"""What is logged of clients that speak no HTTP, by a real server."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from aiohttp import web

from cohort.common.config import LoggingConfig
from cohort.common.http import http_server
from cohort.common.http.http_server import NO_HTTP_EVERY_S, name_server
from cohort.common.process.logs import configure_logging


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    written = io.StringIO()
    configure_logging(LoggingConfig(format="json"), service="gateway", instance="gateway", stream=written)
    yield written
    root.handlers[:] = before
    root.setLevel(level)


async def test_what_is_no_http_is_a_line_a_second_and_a_defect_one_each(
    lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [1e9]
    monkeypatch.setattr(http_server, "time", SimpleNamespace(monotonic=lambda: now_s[0]))

    async def defect(_: web.Request) -> web.Response:
        raise KeyError("ours")

    name_server()
    name_server()  # a process has servers
    app = web.Application()
    app.router.add_get("/defect", defect)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]

    async def send(head: bytes) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head + b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        answer = await reader.read()
        writer.close()
        return answer

    try:
        for _ in range(20):
            assert b" 400 " in await send(b"GET /\x00" + b"x" * 1000)
        now_s[0] += NO_HTTP_EVERY_S
        assert b" 400 " in await send(b"GET /\x00")
        assert b" 500 " in await send(b"GET /defect")
    finally:
        await runner.cleanup()
    first, second, error = map(json.loads, lines.getvalue().splitlines())
    assert (first["level"], first["times"], second["times"]) == ("warning", 1, 20)
    assert first["error"].startswith("Invalid char") and "exception" not in first
    assert error["level"] == "error" and "KeyError: 'ours'" in error["exception"]
    assert len(lines.getvalue().splitlines()[0]) < 400
