"""How many files of the product a streamed chat needs at the gateway, from its connection to its first event."""

from __future__ import annotations

import asyncio

import aiohttp

from tests.services.gateway.conftest import OpenSite
from tests.support.traced import recording

CAP = 36
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100, "stream": True}


async def test_a_streamed_chat_touches_few_files(open_site: OpenSite) -> None:
    with recording() as trace:
        async with open_site() as site:
            assert await site.stream("/v1/chat/completions", CHAT)  # what begins with the gateway has ended by then
            rest = asyncio.Event()
            gates = iter([asyncio.sleep(0)])
            site.manager.gate = lambda: next(gates, None) or rest.wait()
            async with aiohttp.ClientSession() as session:
                trace.on = True
                async with session.post(f"{site.url}/v1/chat/completions", json=CHAT) as response:
                    assert b'"role":"assistant"' in await response.content.readuntil(b"\n\n")
                    trace.on = False
                    rest.set()
                    assert (await response.read()).endswith(b"data: [DONE]\n\n")
    files = trace.files
    told = f"{len(files)} files, {len(trace.calls)} functions, {sum(trace.calls.values())} calls"
    assert len(files) <= CAP, "\n".join([told, *files])
