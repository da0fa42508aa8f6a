"""A bare aiohttp server that sends given bytes: `python -m cohort.services.bench.tokens.bare PORT STEP_S FILE`.

Started by `measuring.py` after the gateway, whose bytes it repeats: the file's, to a stream once in STEP_S, to any
other request as the answer. It reads a body as JSON, and does nothing else of what a gateway does.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop
from aiohttp import web


def application(step_s: float, sent: bytes) -> web.Application:
    async def answer(request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return web.Response(body=sent, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        while True:
            await response.write(sent)
            await asyncio.sleep(step_s)

    application = web.Application()
    application.add_routes([web.post("/v1/chat/completions", answer)])
    return application


if __name__ == "__main__":
    port, step_s, file = sys.argv[1:]
    web.run_app(
        application(float(step_s), Path(file).read_bytes()),
        host="127.0.0.1",
        port=int(port),
        access_log=None,
        print=None,
        loop=uvloop.new_event_loop(),
    )
