"""Clients as cheap as Python can make them: one protocol per connection, no parsing.

Opened by `measuring.py`: streams, whose events are counted where `data: ` begins one (texts never hold it, the engine
says words), and users, who send the next short request when they have the answer to the last.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence

from cohort.services.bench.child import MeasurementFailed

_EVENT = b"data: {"
KEEP = "x-cohort-resume: keep\r\n"
_OK = b"HTTP/1.1 200"
_LENGTH = re.compile(rb"Content-Length: (\d+)")


class Client(asyncio.Protocol):
    """One connection, which sends its request as soon as it is there."""

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.events = 0
        """Events of a stream, or answers."""
        self.reads = 0
        self.bytes = 0
        self.ended = ""
        """Reason why there is nothing more; "" while it runs."""
        self.sample = b""
        """Bytes that came last: an event, or the body of an answer."""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.write(self.request)

    def connection_lost(self, error: Exception | None) -> None:
        self.ended = self.ended or f"connection lost: {error}"


class Stream(Client):
    """One request: its events are counted until it closes."""

    def __init__(self, request: bytes) -> None:
        super().__init__(request)
        self._tail = b""
        self._head = b""

    def data_received(self, data: bytes) -> None:
        self.reads += 1
        self.bytes += len(data)
        if len(self._head) < len(_OK):
            self._head += data[: len(_OK)]
            if len(self._head) >= len(_OK) and not self._head.startswith(_OK):
                self.ended = data.decode(errors="replace")
        self.events += (self._tail + data).count(_EVENT)
        self._tail = data[-len(_EVENT) + 1 :]
        self.sample = data

    @property
    def event(self) -> bytes:
        """One event as it came last, without the chunk around it."""
        event = self.sample.split(b"\r\n")[1]
        assert event.startswith(_EVENT), f"not a chunk with an event: {self.sample[:80]!r}"
        return event


class User(Client):
    """Short requests, one after the other."""

    def __init__(self, request: bytes) -> None:
        super().__init__(request)
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        length = _LENGTH.search(head)
        if end and (length is None or not head.startswith(_OK)):
            self.ended = self._received.decode(errors="replace")
        elif end and length is not None and len(body) == int(length[1]):
            self.events += 1
            self.bytes += len(self._received)
            self._received, self.sample = b"", body
            assert self.transport is not None
            self.transport.write(self.request)


class Clients:
    def __init__(self, clients: Sequence[Client]) -> None:
        self.clients = clients

    @classmethod
    async def open(cls, kind: type[Client], port: int, requests: Sequence[bytes]) -> Clients:
        """Connect a client to this machine's port for each request."""
        loop, clients = asyncio.get_running_loop(), list[Client]()
        for request in requests:
            _, client = await loop.create_connection(lambda request=request: kind(request), "127.0.0.1", port)  # type: ignore[misc]
            clients.append(client)
        return cls(clients)

    async def all_running(self, timeout_s: float) -> None:
        """Wait until every client has had two events. Raises `MeasurementFailed`."""
        try:
            async with asyncio.timeout(timeout_s):
                while min(client.events for client in self.clients) < 2:
                    self.check()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            waiting = sum(client.events < 2 for client in self.clients)
            raise MeasurementFailed(f"{waiting} of {len(self.clients)} clients have not begun") from None

    def check(self) -> None:
        """Raise `MeasurementFailed` where a client has ended."""
        for client in self.clients:
            if client.ended:
                raise MeasurementFailed(f"a client ended early: {client.ended[:500]}")

    def counts(self) -> tuple[int, int, int]:
        events, reads, sizes = zip(*((each.events, each.reads, each.bytes) for each in self.clients), strict=True)
        return sum(events), sum(reads), sum(sizes)

    def close(self) -> None:
        for client in self.clients:
            if client.transport is not None:
                client.transport.abort()


def chat(model: str, prompt: str, output_tokens: int, *, stream: bool, resumable: bool = False) -> bytes:
    """Return an HTTP request for a chat of one message. `resumable`: for a stream to go on with."""
    body = json.dumps(
        {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "stream": stream,
            "temperature": 0,
        }
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        f"{KEEP if resumable else ''}\r\n"
    )
    return head.encode() + body
