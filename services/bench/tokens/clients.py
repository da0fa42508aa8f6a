"""Clients that stream from a gateway and count, as cheaply as Python can: one protocol per connection, no parsing.

Called by `measuring.py`. An event is counted where `data: ` begins one; texts never hold that (the engine says words).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

from cohort.services.bench.child import MeasurementFailed

_EVENT = b"data: {"
KEEP = "x-cohort-resume: keep\r\n"
_OK = b"HTTP/1.1 200"


class Stream(asyncio.Protocol):
    """One request: sent when the connection is there, its events counted until it closes."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._tail = b""
        self._head = b""
        self.events = 0
        self.reads = 0
        self.bytes = 0
        self.ended = ""
        """Why there is nothing more; "" while it runs."""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        self.bytes += len(data)
        if len(self._head) < len(_OK):
            self._head += data[: len(_OK)]
            if len(self._head) >= len(_OK) and not self._head.startswith(_OK):
                self.ended = data.decode(errors="replace")
        self.events += (self._tail + data).count(_EVENT)
        self._tail = data[-len(_EVENT) + 1 :]

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = self.ended or f"connection lost: {error}"


class Clients:
    """All streams of a measurement; `close` ends them."""

    def __init__(self, streams: Sequence[Stream]) -> None:
        self._streams = streams

    @classmethod
    async def open(
        cls, host: str, port: int, model: str, count: int, output_tokens: int, *, resumable: bool = False
    ) -> Clients:
        """Connects `count` of them, each with a prompt of its own. `resumable`: they ask for streams to go on with."""
        loop = asyncio.get_running_loop()
        streams = []
        for index in range(count):
            request = _request(host, port, model, f"Stream {index} says", output_tokens, resumable=resumable)
            _, stream = await loop.create_connection(lambda request=request: Stream(request), host, port)  # type: ignore[misc]
            streams.append(stream)
        return cls(streams)

    async def all_running(self, timeout_s: float) -> None:
        """Until every stream has had two events. Raises `MeasurementFailed`."""
        try:
            async with asyncio.timeout(timeout_s):
                while min(stream.events for stream in self._streams) < 2:
                    self.check()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            waiting = sum(stream.events < 2 for stream in self._streams)
            raise MeasurementFailed(f"{waiting} of {len(self._streams)} streams have not begun") from None

    def check(self) -> None:
        """Raises `MeasurementFailed` where a stream has ended."""
        for stream in self._streams:
            if stream.ended:
                raise MeasurementFailed(f"a stream ended early: {stream.ended[:500]}")

    def counts(self) -> tuple[int, int, int]:
        """Events, reads and bytes of all."""
        events, reads, sizes = zip(*((each.events, each.reads, each.bytes) for each in self._streams), strict=True)
        return sum(events), sum(reads), sum(sizes)

    def close(self) -> None:
        for stream in self._streams:
            if stream.transport is not None:
                stream.transport.abort()


def _request(host: str, port: int, model: str, prompt: str, output_tokens: int, *, resumable: bool) -> bytes:
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0,
        }
    ).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"{KEEP if resumable else ''}\r\n"
    )
    return head.encode() + body
