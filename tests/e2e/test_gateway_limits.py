"""Two gateways on one port are one server to a key: one limit, given back by a gateway that is killed, one memory."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.pipeline import Pipeline
from tests.e2e.test_gateways import until_ready

pytestmark = pytest.mark.pipeline

GATEWAYS = ("gateway", "gateway-1")
KEY = {"Authorization": "Bearer of-alice"}
OPEN = 2
DEADLINE_S = 120.0
LONG = {"prompt": "One and two are", "max_tokens": 900, "temperature": 0, "ignore_eos": True, "stream": True}
SHORT: dict[str, Any] = {"max_output_tokens": 4, "temperature": 0}


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, default_model: Path) -> Iterator[Pipeline]:
    folder = tmp_path_factory.mktemp("limits")
    overrides = {
        "gateway": {"processes": 2, "api_keys": ["of-alice"]},
        "keys": {"limits": {"concurrent_requests": OPEN}},
        "model": {"max_model_len": 1024},
        "kv": {"memory_bytes": 200 << 20},
    }
    with Pipeline(folder, default_model, overrides, preset="unified") as running:
        until_ready(running)
        yield running


class Client:
    """One connection with a stream on it, as far as the key may have one."""

    def __init__(self) -> None:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S), headers=KEY)
        self._response: aiohttp.ClientResponse | None = None

    async def open(self, pipeline: Pipeline) -> int:
        """The status; 200 with its first event."""
        self._response = await self._session.post(f"{pipeline.url}/v1/completions", json=LONG)
        if self._response.status == 200:
            await self._response.content.readline()
        else:
            assert self._response.status == 429 and f"{OPEN} are open" in await self._response.text()
        return self._response.status

    async def close(self) -> None:
        if self._response is not None:
            self._response.close()
        await self._session.close()


async def opened(pipeline: Pipeline, count: int) -> tuple[list[Client], list[int]]:
    """At the same time, on connections of their own."""
    clients = [Client() for _ in range(count)]
    return clients, await asyncio.gather(*(client.open(pipeline) for client in clients))


def streams_of(pipeline: Pipeline) -> dict[str, float]:
    """Open at each gateway, once two heartbeats have told."""
    pipeline.wait_told(*GATEWAYS)
    return {name: pipeline.heard(name).get("open_streams", 0.0) for name in GATEWAYS}


async def apart(pipeline: Pipeline) -> list[Client]:
    """As many streams as the key may have, one of them at each gateway: the kernel chooses until it does so."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        clients, statuses = await opened(pipeline, OPEN)
        if statuses == [200] * OPEN and all((await asyncio.to_thread(streams_of, pipeline)).values()):
            return clients
        assert time.monotonic() < deadline, statuses
        for client in clients:
            await client.close()
        await asyncio.sleep(0.2)


async def test_four_at_once_over_both_are_two(pipeline: Pipeline) -> None:
    for _ in range(4):
        clients, statuses = await opened(pipeline, 4)
        assert sorted(statuses) == [200, 200, 429, 429]
        for client in clients:
            await client.close()
        deadline = time.monotonic() + DEADLINE_S
        while any((await asyncio.to_thread(streams_of, pipeline)).values()):
            assert time.monotonic() < deadline


async def test_a_conversation_goes_on_at_either_gateway(pipeline: Pipeline) -> None:
    async def respond(**body: Any) -> dict[str, Any]:
        async with (
            aiohttp.ClientSession(headers=KEY) as session,  # a connection of its own
            session.post(f"{pipeline.url}/v1/responses", json={**SHORT, **body}) as response,
        ):
            assert response.status == 200, await response.text()
            answer: dict[str, Any] = await response.json()
            return answer

    before = {name: pipeline.heard(name).get("requests_total", 0.0) for name in GATEWAYS}
    first = await respond(input="Name a city.")
    tokens = []
    deadline = time.monotonic() + DEADLINE_S
    while True:
        for _ in range(8):
            answer = await respond(input="And one more.", previous_response_id=first["id"])
            tokens.append(answer["usage"]["input_tokens"])
        assert len(set(tokens)) == 1 and tokens[0] > first["usage"]["input_tokens"]
        await asyncio.to_thread(pipeline.wait_told, *GATEWAYS)
        if all(pipeline.heard(name).get("requests_total", 0.0) > before[name] for name in GATEWAYS):
            break
        assert time.monotonic() < deadline, "the kernel gave every connection to one gateway"


async def test_a_killed_gateway_gives_back_what_it_had_open(pipeline: Pipeline) -> None:
    clients = await apart(pipeline)
    more, statuses = await opened(pipeline, 4)
    assert statuses == [429] * 4, "of either gateway"
    await asyncio.to_thread(pipeline.kill, "gateway-1")
    after, statuses = await opened(pipeline, 3)
    assert sorted(statuses) == [200, 429, 429], "that of the dead one, and no more"
    for client in (*clients, *more, *after):
        await client.close()
    pipeline.start("gateway-1")
    await asyncio.to_thread(until_ready, pipeline)
