"""Server-sent events to one client: when the stream opens, how an event is written, how it ends and how it fails.

Called by the APIs that stream. The response is opened with the first event, so that a failure before the first token is
still answered with a proper HTTP status. A client that reads too slowly fills the socket, then blocks this stream only,
and is given up after `write_timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

import msgspec
import structlog
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.services.gateway.http.error_shapes import error_body

DONE = b"data: [DONE]\n\n"
# Below what a transport buffers before it asks its writer to wait.
AT_ONCE_BYTES = 16_384
_encode = msgspec.json.Encoder().encode


class Events(Protocol):
    """Where the events of an answer go."""

    async def send(self, event: msgspec.Struct | dict[str, Any]) -> None: ...

    async def done(self) -> None: ...


class Outbox:
    """Events of many streams, sent together once the messages that brought them are handled; one per API.

    A stream that was brought several tokens by then, as when this process is behind, is sent them as one write.
    """

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: EventStream) -> None:
        """It has something to send."""
        if not self._streams:
            asyncio.get_running_loop().call_soon(self._flush)
        self._streams.append(stream)

    def _flush(self) -> None:
        streams, self._streams = self._streams, []
        for stream in streams:
            stream.flush()


class EventStream:
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
        self.keeps_up = False
        """The stream is open, and its client takes what it is sent: `soon` may be asked."""
        self._chunked = False
        self._soon: list[bytes] = []
        """Events that leave with the outbox, before any other."""
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

    def mark(self, index: int) -> bytes:
        """What stands before an event that says more of this choice: nothing, where its client is given no places."""
        return b""

    def soon(self, event: bytes, outbox: Outbox) -> None:
        """An event of a stream that `keeps_up`, to be sent by the outbox."""
        if not self._soon:
            outbox.add(self)
        self._soon.append(event)

    def flush(self) -> None:
        """Straight to the transport: what `StreamResponse.write` would do."""
        events = self._soon
        if not events:
            return
        self._soon = []
        transport = self._request.transport
        if transport is None or transport.is_closing():
            self.keeps_up = False
            return  # its handler hears of it from aiohttp
        data = events[0] if len(events) == 1 else b"".join(events)
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        writer = self._request.writer
        writer.buffer_size += len(data)
        writer.output_size += len(data)
        transport.write(data)
        self.keeps_up = transport.get_write_buffer_size() < AT_ONCE_BYTES

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
        self.flush()
        async with asyncio.timeout(self._write_timeout_s):
            await self.response.write_eof()

    async def _write(self, data: bytes) -> None:
        self.flush()
        transport = self._request.transport
        empty = transport is not None and not transport.get_write_buffer_size()
        if empty and self.response.prepared and len(data) < AT_ONCE_BYTES:
            # This event goes straight to the socket: nothing to wait for, no timer.
            await self.response.write(data)
        else:
            async with asyncio.timeout(self._write_timeout_s):
                if not self.response.prepared:
                    await self.response.prepare(self._request)
                    self._chunked = self.response.headers.get("Transfer-Encoding") == "chunked"
                await self.response.write(data)
        self.keeps_up = transport is not None and transport.get_write_buffer_size() < AT_ONCE_BYTES
