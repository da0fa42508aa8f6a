"""Server-sent events to one client: when the stream opens, how an event is written, how it ends and how it fails.

Called by the APIs that stream. The response is opened with the first event, so that a failure before the first token is
still answered with a proper HTTP status. A client that reads too slowly fills the socket, then blocks this stream only,
and is given up after `write_timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, ClassVar, Protocol

import msgspec
import structlog
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.services.gateway.error_shapes import error_body

DONE = b"data: [DONE]\n\n"
# Below what a transport buffers before it asks its writer to wait.
AT_ONCE_BYTES = 16_384
_encode = msgspec.json.Encoder().encode


class Events(Protocol):
    """Where the events of an answer go."""

    async def send(self, event: msgspec.Struct | dict[str, Any]) -> None: ...

    async def done(self) -> None: ...


class EventStream:
    plain: ClassVar[bool] = True
    """Its events are nothing but what they say."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        *,
        write_timeout_s: float,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._request = request
        self._write_timeout_s = write_timeout_s
        self._log = log
        self._transport: asyncio.Transport | None = None
        self._chunked = False
        """Once the response is open: where it goes, and in which form."""
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

    async def carry(
        self, sending: Awaitable[None], fail: Callable[[RequestError], Awaitable[None]]
    ) -> web.StreamResponse:
        """Let `sending` send its events. What it raises once the stream is open is told by `fail`, in the words of its
        API: a stream never breaks off silently. Raises what happens before that."""
        try:
            await sending
        except RequestError as error:
            if not self.started:
                raise
            await fail(error)
        except ConnectionError:
            self._log.debug("client went away")
        except TimeoutError:
            self._log.warning("client does not read its stream", write_timeout_s=self._write_timeout_s)
            if self._request.transport is not None:
                self._request.transport.abort()
        except Exception:
            if not self.started:
                raise
            # A defect of ours: the client must not take half an answer for a whole one.
            self._log.exception("stream failed unexpectedly")
            await fail(RequestError("The server failed to continue.", status=500, type_="server_error"))
        return self.response

    async def send(self, event: msgspec.Struct | dict[str, Any]) -> None:
        """Raises `TimeoutError` when the client does not read, `ConnectionError` when it is gone."""
        await self._write(self.framed(event))

    def keeps_up(self) -> bool:
        """The stream is open, and its client takes what it is sent: `at_once` has somewhere to go."""
        transport = self._transport
        if transport is None:
            transport = self._request.transport
            if transport is None or not self.response.prepared:
                return False
            self._transport = transport
            self._chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
        return not transport.is_closing() and transport.get_write_buffer_size() < AT_ONCE_BYTES

    def at_once(self, data: bytes) -> None:
        """Events of a stream that `keeps_up`, straight to the transport: what `StreamResponse.write` would do."""
        assert self._transport is not None
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        writer = self._request.writer
        writer.buffer_size += len(data)
        writer.output_size += len(data)
        self._transport.write(data)

    @staticmethod
    def framed(event: msgspec.Struct | dict[str, Any]) -> bytes:
        return b"data: " + _encode(event) + b"\n\n"

    async def send_named(self, *events: tuple[str, msgspec.Struct]) -> None:
        """Events with their names, as one write."""
        parts = [b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(event)) for name, event in events]
        if parts:
            await self._write(b"".join(parts))

    async def fail(self, error: RequestError) -> None:
        """As clients of OpenAI's chunks read it: say why, then end properly."""
        await self._write(self.framed(error_body(error)))
        await self.done()

    async def done(self) -> None:
        """The end of a stream of OpenAI's chunks."""
        await self._write(DONE)
        await self.end()

    async def end(self) -> None:
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
