"""Connections from their first request to their end: handed over to another process, or given up.

    SIGUSR1 ─▶ accept nothing more ─▶ each response says `Connection: close` ─▶ nothing asked for a second ─▶ drain

`Handover`: the end of a gateway whose port another one takes over (`cohort restart`), at which no connection ends amid
a request. A client that was told so opens its next connection, which waits at the port for the other process. A client
that keeps a connection open without a request finds it closed, as ever.

`SlowReaders`: a connection whose unsent bytes do not move is aborted. Whole answers, errors and contents of files leave
through the transport's buffer after their handler has ended, where no handler's timeout reaches; this watch looks at
the buffers themselves. Event streams have a timeout of their own besides (`sse.py`).

One of each per gateway, made by `service.py`; their middlewares see every request.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import signal
import socket
import struct
import termios
import threading
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.typedefs import Handler, Middleware

QUIET_S = 1.0
"""Time without a request until connections count as idle: a client's next request comes within it."""
_POLL_S = 0.05
SIGNAL = signal.SIGUSR1
CHECKS = 4
"""Checks within the shorter of the two times: a connection is aborted at most this fraction of it too late."""


class Handover:
    def __init__(self, stopping: asyncio.Event) -> None:
        """`stopping` is set when another process is to take over."""
        self._stopping = stopping
        self.requested = False
        self._running = 0
        self._ended_s = float("-inf")

    def listen(self) -> None:
        """Handle the signal from now on, on the running loop; only the main thread's loop receives signals."""
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(SIGNAL, self._request)

    def middleware(self) -> Middleware:
        """Return a middleware that counts running requests."""

        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            self._running += 1
            try:
                return await handler(request)
            finally:
                self._running -= 1
                self._ended_s = asyncio.get_running_loop().time()

        return middleware

    async def end_connection(self, _: web.Request, response: web.StreamResponse) -> None:
        """End the connection with this response; for `on_response_prepare`."""
        if self.requested:
            response.force_close()
            response.headers["Connection"] = "close"

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until no request has run for `QUIET_S`."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while (now_s := loop.time()) < began_s + timeout_s:
            if not self._running and now_s - max(began_s, self._ended_s) >= QUIET_S:
                return
            await asyncio.sleep(_POLL_S)

    def _request(self) -> None:
        self.requested = True
        self._stopping.set()


@dataclass(slots=True)
class _Connection:
    """`moved_s`: when bytes last left for the client: those written less those unsent and those in the kernel, which
    takes more only when a third of its buffer (megabytes) is free."""

    writer: AbstractStreamWriter
    moved_s: float
    pending_since_s: float | None = None
    written_before: int = 0
    """Bytes written by the requests before this one."""
    sent: int = 0
    endless: bool = False
    """Whether it may take any time while it moves: a file's content."""


class SlowReaders:
    def __init__(
        self, *, still_s: float, whole_s: float, aborted: Callable[[], None], log: structlog.stdlib.BoundLogger
    ) -> None:
        """`still_s`: the longest an answer may stand still; `whole_s`: the longest it may take, so that a byte now and
        then keeps nothing open. `aborted` is called for each connection given up."""
        self._still_s = still_s
        self._whole_s = whole_s
        self._aborted = aborted
        self._log = log
        self._connections: dict[asyncio.Transport, _Connection] = {}
        self._timer: asyncio.TimerHandle | None = None

    def middleware(self) -> Middleware:
        @web.middleware
        async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = self._follow(request)
            response = await handler(request)
            if connection is not None:
                connection.endless = isinstance(response, web.FileResponse)
            return response

        return middleware

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _follow(self, request: web.Request) -> _Connection | None:
        transport = request.transport
        if transport is None:
            return None
        now_s = asyncio.get_running_loop().time()
        connection = self._connections.get(transport)
        if connection is None:
            connection = self._connections[transport] = _Connection(request.writer, now_s)
        else:
            connection.written_before += connection.writer.output_size
            connection.writer = request.writer
            connection.endless = False
        if self._timer is None:
            self._check_later()
        return connection

    def _check_later(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(min(self._still_s, self._whole_s) / CHECKS, self._check)

    def _check(self) -> None:
        self._timer = None
        now_s = asyncio.get_running_loop().time()
        for transport, connection in list(self._connections.items()):
            pending = _unsent(transport)
            if not pending and transport.is_closing():
                del self._connections[transport]
            elif self._too_slow(connection, pending, _unacknowledged(transport), now_s):
                del self._connections[transport]
                self._log.warning(
                    "client does not read its answer",
                    unsent_bytes=pending,
                    still_s=round(now_s - connection.moved_s, 3),
                    write_timeout_s=self._still_s,
                )
                _drop(transport)
                self._aborted()
        if self._connections:
            self._check_later()

    def _too_slow(self, connection: _Connection, pending: int, in_kernel: int, now_s: float) -> bool:
        sent = connection.written_before + connection.writer.output_size - pending - in_kernel
        if not pending or sent != connection.sent:
            connection.sent, connection.moved_s = sent, now_s
        if not pending:
            connection.pending_since_s = None
            return False
        if connection.pending_since_s is None:
            connection.pending_since_s = now_s
        late = not connection.endless and now_s - connection.pending_since_s >= self._whole_s
        return late or now_s - connection.moved_s >= self._still_s


def _drop(transport: asyncio.Transport) -> None:
    """Close it with a reset: otherwise the kernel goes on offering the client the megabytes it has taken already."""
    at_once = struct.pack("ii", 1, 0)
    with contextlib.suppress(OSError, AttributeError):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, at_once)
    transport.abort()


def _unsent(transport: asyncio.Transport) -> int:
    try:
        return transport.get_write_buffer_size()
    except RuntimeError:  # of a closed transport
        return 0


def _unacknowledged(transport: asyncio.Transport) -> int:
    """Return the bytes that the kernel has taken and the client has not acknowledged."""
    count = array.array("i", [0])
    with contextlib.suppress(OSError, AttributeError):
        fcntl.ioctl(transport.get_extra_info("socket").fileno(), termios.TIOCOUTQ, count)
    return count[0]
