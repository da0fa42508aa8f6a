"""`GET /api/live`: the live page's feed, server-sent events, one `LiveState` a second as JSON.

`?request=ID` chooses the request whose life the page shows. An open connection is what "somebody looks" means:
processes are asked for their views while there is one (`looking.py`). A reader that is slow misses updates and gets
the latest state next; one that takes nothing is let go. Called by `server.py`; changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
from aiohttp import web

from cohort.common.types import RequestId
from cohort.common.views import MOST_ID
from cohort.services.global_monitor.live import LiveState
from cohort.services.global_monitor.looking import Looking, TooManyViewers

_WRITE_TIMEOUT_S = 20.0
_FIRST_S = 0.15
"""Time from the first request to the first update: processes answer within milliseconds."""
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class LiveFeed:
    def __init__(self, looking: Looking, read: Callable[[RequestId], LiveState]) -> None:
        self._looking = looking
        self._read = read
        self._encode = msgspec.json.Encoder().encode

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Stream updates until the page is closed; 503 if there are too many viewers."""
        chosen = request.query.get("request", "")
        if len(chosen) > MOST_ID:
            raise web.HTTPBadRequest(text=f"request: an id of {MOST_ID} characters at most\n")
        response = web.StreamResponse(headers=_HEADERS)
        try:
            async with self._looking.watching(chosen) as viewer:
                await response.prepare(request)
                await asyncio.sleep(_FIRST_S)
                while True:
                    viewer.news.clear()
                    async with asyncio.timeout(_WRITE_TIMEOUT_S):
                        await response.write(b"data: " + self._encode(self._read(chosen)) + b"\n\n")
                    await viewer.news.wait()
        except TooManyViewers:
            raise web.HTTPServiceUnavailable(text="too many pages are open\n", headers={"Retry-After": "10"}) from None
        except (TimeoutError, ConnectionError):
            return response
