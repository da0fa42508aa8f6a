"""Server-sent events to one client: when the stream opens, how events are written, how it ends and how it fails.

Made by `generator.py`. The response opens with the first event, so that an earlier failure has a proper HTTP status. A
client that reads too slowly blocks this stream only, and is given up after `write_timeout_s`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
import structlog
from aiohttp import web

from cohort.common.errors import RequestError

DONE = b"data: [DONE]\n\n"
# Below what a transport buffers before it asks its writer to wait.
AT_ONCE_BYTES = 16_384
_encode = msgspec.json.Encoder().encode


def framed(event: msgspec.Struct) -> bytes:
    return b"data: " + _encode(event) + b"\n\n"


def named(name: str, event: msgspec.Struct) -> bytes:
    """Encode an event with its name."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(event))


class Outbox:
    """Events of many streams, sent together once the messages that brought them are handled; one per gateway. Several
    tokens of a stream are one write."""

    def __init__(self) -> None:
        self._streams: list[EventStream] = []

    def add(self, stream: EventStream) -> None:
        """Add a stream that has something to send."""
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
        outbox: Outbox,
        *,
        write_timeout_s: float,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        self._request = request
        self._outbox = outbox
        self._write_timeout_s = write_timeout_s
        self._log = log
        self.keeps_up = False
        """Whether the stream is open and its client reads: `soon` may be called."""
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

    async def run(
        self, sending: Awaitable[None], failed: Callable[[RequestError], Sequence[bytes]]
    ) -> web.StreamResponse:
        """Let `sending` send its events. What it raises once the stream is open is sent in `failed`'s format: a stream
        never breaks off silently. Earlier errors are raised."""
        try:
            await sending
            await self._end()
        except RequestError as error:
            if not self.started:
                raise
            await self._end(failed(error))
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
            await self._end(failed(RequestError("The server failed to continue.", status=500, type_="server_error")))
        return self.response

    def soon(self, event: bytes) -> None:
        """Queue an event of a stream that `keeps_up`; the outbox sends it."""
        if not self._soon:
            self._outbox.add(self)
        self._soon.append(event)

    def flush(self) -> None:
        """Write straight to the transport, as `StreamResponse.write` would."""
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

    async def send(self, events: Sequence[bytes]) -> None:
        """Send as one write. Raises `TimeoutError` when the client does not read, `ConnectionError` when it is gone."""
        if not events:
            return
        data = events[0] if len(events) == 1 else b"".join(events)
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

    async def _end(self, events: Sequence[bytes] = ()) -> None:
        await self.send(events)
        self.flush()
        async with asyncio.timeout(self._write_timeout_s):
            await self.response.write_eof()
