"""Server-sent events to one client: when the stream opens, how an event is written, how it ends.

Called by `openai_api.py`. The response is opened with the first event, so that a failure before the first token is
still answered with a proper HTTP status. A client that reads too slowly fills the socket, then blocks this stream only,
and is given up after `write_timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.services.gateway.responses import error_body

DONE = b"data: [DONE]\n\n"
# Below what a transport buffers before it asks its writer to wait.
AT_ONCE_BYTES = 16_384
_encode = msgspec.json.Encoder().encode


class Events(Protocol):
    """Where the events of an answer go."""

    async def send(self, event: msgspec.Struct | dict[str, Any]) -> None: ...

    async def done(self) -> None: ...


class EventStream:
    def __init__(self, request: web.Request, headers: Mapping[str, str], *, write_timeout_s: float) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self.response = web.StreamResponse(
            headers={
                **headers,
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # proxies that buffer would turn a stream into one late answer
            }
        )

    @property
    def started(self) -> bool:
        return self.response.prepared

    async def send(self, event: msgspec.Struct | dict[str, Any]) -> None:
        """Raises `TimeoutError` when the client does not read, `ConnectionError` when it is gone."""
        await self._write(self.framed(event))

    @staticmethod
    def framed(event: msgspec.Struct | dict[str, Any]) -> bytes:
        return b"data: " + _encode(event) + b"\n\n"

    async def fail(self, error: RequestError) -> None:
        """The only way a stream may break off: say why, then end it properly."""
        await self._write(b"data: " + _encode(error_body(error)) + b"\n\n")
        await self.done()

    async def done(self) -> None:
        await self._write(DONE)
        async with asyncio.timeout(self._write_timeout_s):
            await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        transport = self._request.transport
        keeps_up = transport is not None and not transport.get_write_buffer_size()
        if keeps_up and self.response.prepared and len(data) < AT_ONCE_BYTES:
            # This event goes straight to the socket: nothing to wait for, no timer.
            await self.response.write(data)
            return
        async with asyncio.timeout(self._write_timeout_s):
            if not self.response.prepared:
                await self.response.prepare(self._request)
            await self.response.write(data)
