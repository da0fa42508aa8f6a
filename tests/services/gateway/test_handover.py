"""A gateway whose port another one takes over serves what its connections still bring, and takes no new ones."""

from __future__ import annotations

import asyncio
import os
import signal
import socket

import aiohttp
import pytest

from tests.services.gateway.conftest import OpenSite, Site, eventually

ASKED = {"prompt": "the harbour", "max_tokens": 30, "ignore_eos": True}


async def begun(site: Site) -> None:
    await eventually(lambda: any(entry.output for entry in site.gateway.streams.ledger.entries()))


async def test_open_connections_are_served_once_more_and_then_closed(open_site: OpenSite) -> None:
    async with open_site(lambda request: [9] * 30, step_s=0.03, drain_s=8.0) as site:
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as client:
            url = site.url + "/v1/completions"
            async with client.post(url, json={**ASKED, "stream": True}) as response:
                await begun(site)
                os.kill(os.getpid(), signal.SIGUSR1)
                await eventually(site.context.stopping.is_set)
                data = await response.read()
            assert data.endswith(b"data: [DONE]\n\n") and b'"error"' not in data
            site.manager.step_s = 0.0
            async with client.post(url, json=ASKED) as response:
                assert response.status == 200 and response.headers["Connection"] == "close"
                assert (await response.json())["choices"][0]["finish_reason"] == "length"
            with pytest.raises(aiohttp.ClientConnectorError):
                await client.post(url, json=ASKED)
        async with asyncio.timeout(8):
            await site.task


async def test_what_outlasts_the_drain_is_told_so(open_site: OpenSite) -> None:
    async with open_site(lambda request: [9] * 200, step_s=0.05, drain_s=0.3) as site:
        stream = asyncio.create_task(site.stream("/v1/completions", {**ASKED, "max_tokens": 200}))
        await begun(site)
        os.kill(os.getpid(), signal.SIGUSR1)
        *_, error, done = await stream
        assert (error["error"]["code"], done) == ("503", "[DONE]")


async def test_connections_wait_at_a_held_port(open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket that somebody else holds, too, goes on listening when the gateway has gone."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        monkeypatch.setenv("COHORT_LISTENERS", str(held.dup().detach()))
        port = held.getsockname()[1]
        async with open_site(port=port) as site:
            assert (await site.get("/health"))[0] == 200
            os.kill(os.getpid(), signal.SIGUSR1)
            async with asyncio.timeout(8):
                await site.task
            with socket.create_connection(("127.0.0.1", port), timeout=5):
                held.setblocking(True)
                held.settimeout(5)
                connection, _ = held.accept()
                connection.close()
