"""The common base of HTTP servers, below their handlers: their name, the way they accept connections, and what they log
of requests that are no HTTP.

Called by the gateway, the monitor and `service.py`. Knows no routes.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import socket
import time
from collections.abc import Callable, Sequence

import structlog
from aiohttp import web, web_response
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from cohort.common.http.browsers import BrowserGuard
from cohort.common.http.listeners import bound_everywhere
from cohort.common.http.tls import ServerTls

SERVER = "cohort"
ACCEPT_PAUSE_S = 0.5
"""Pause after a failed accept; meanwhile the kernel keeps what arrives in the backlog."""
LOG_EVERY_S = 10.0
NO_HTTP_EVERY_S = 1.0
"""Time between two lines about requests that are no HTTP: 26,200 in 20 s were 21 MB of tracebacks."""
HANDSHAKE_S = 10.0
"""Longest time for a client's TLS handshake."""
CLOSE_S = 1.0
"""Time at the end for connections that are being opened."""
_TRANSIENT = (errno.ECONNABORTED, errno.EPROTO, errno.EINTR)
"""Errors of a client that was gone before it was accepted: nothing is wrong here."""


def name_server() -> None:
    """Set the `Server` header of this process to its name, without the versions of Python and aiohttp, which would help
    an attacker. It is also in answers to what is no HTTP, which no handler or signal sees."""
    setattr(web_response, "SERVER_SOFTWARE", SERVER)  # noqa: B010 -- not exported, and there is no other way
    logging.getLogger("aiohttp.server").addFilter(_no_http)  # where it is already, this does nothing


class NoHttpFilter(logging.Filter):
    """Filter of aiohttp's log: of requests that it cannot parse a line a second, as any client can send them. `times`:
    how many since the line before. Errors of handlers pass as they are."""

    def __init__(self) -> None:
        super().__init__()
        self._logged_s = float("-inf")
        self._times = 0

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError):
            return True
        self._times += 1
        if (now_s := time.monotonic()) < self._logged_s + NO_HTTP_EVERY_S:
            return False
        record.levelno, record.levelname, record.exc_info = logging.WARNING, "WARNING", None
        record.__dict__.update(error=error.message.partition("\n")[0][:200].rstrip(":"), times=self._times)
        self._logged_s, self._times = now_s, 0
        return logging.getLogger().isEnabledFor(logging.WARNING)


_no_http = NoHttpFilter()


def refuse_foreign_pages(guard: BrowserGuard) -> Middleware:
    """Return a middleware for servers that answer in plain text."""

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        refusal = guard.refusal(request.method, request.headers)
        if refusal is not None:
            raise web.HTTPForbidden(text=refusal + "\n")
        return await handler(request)

    return middleware


def raise_descriptor_limit() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard one: each connection takes a descriptor, and the usual soft limit
    of 1024 is for programs that `select`. Returns the limits before (soft, hard)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # a hard limit that this system does not take as a soft one
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return soft, hard


class AcceptingSite(web.BaseSite):
    """A `TCPSite` that reports failed accepts: event loops swallow them, and a server without descriptors then drops
    connections silently. Binds every address of `host`; raises `OSError` like `TCPSite`."""

    def __init__(
        self,
        runner: web.AppRunner,
        host: str,
        port: int,
        *,
        backlog: int,
        failed: Callable[[], None],
        log: structlog.stdlib.BoundLogger,
        tls: ServerTls | None = None,
        shared: bool = False,
        held: Sequence[socket.socket] = (),
    ) -> None:
        """`failed` is called once for each accept that failed. `tls`: connections are encrypted, each by the
        certificate that is in use when it comes. `shared`: other processes of this user may listen on the same port;
        the kernel gives each connection to one of them. `held`: sockets bound there that another process holds as well,
        and will give to the next one."""
        super().__init__(runner, backlog=backlog)
        self._host = host
        self._port = port
        self._failed = failed
        self._log = log
        self._tls = tls
        self._shared = shared
        self._listeners: list[socket.socket] = list(held)
        self._held = bool(held)
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        self._opening: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._logged_s = float("-inf")

    @property
    def name(self) -> str:
        port = self.addresses[0][1] if self._listeners else self._port
        return f"{'https' if self._tls else 'http'}://{self._host}:{port}"

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of every listener."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    async def start(self) -> None:
        await super().start()
        loop = asyncio.get_running_loop()
        try:
            if not self._held:
                self._listeners = await asyncio.to_thread(bound_everywhere, self._host, self._port, shared=self._shared)
            for listener in self._listeners:
                listener.listen(self._backlog)
                loop.add_reader(listener, self._accept, listener)
        except BaseException:
            self._close()
            raise

    def leave(self) -> None:
        """Accept nothing more: new connections are for the others that share the port, or for the next process that is
        given the sockets. What waits in a queue of this process alone is accepted first."""
        if not self._held:
            for listener in self._listeners:
                self._accept(listener)
        self._close()

    async def stop(self) -> None:
        self._close()
        if self._opening:
            _, shaking = await asyncio.wait(self._opening, timeout=CLOSE_S)
            for task in shaking:
                task.cancel()
        await super().stop()

    def _close(self) -> None:
        loop = asyncio.get_running_loop()
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()
        for listener in self._listeners:
            loop.remove_reader(listener)
            listener.close()
        self._listeners.clear()

    def _accept(self, listener: socket.socket) -> None:
        """Accept everything that waits in the backlog."""
        for _ in range(self._backlog):
            try:
                connection, _ = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    self._accept_failed(listener, error)
                    return
            else:
                connection.setblocking(False)
                opening = asyncio.get_running_loop().create_task(self._open(connection))
                self._opening.add(opening)
                opening.add_done_callback(self._opening.discard)

    async def _open(self, connection: socket.socket) -> None:
        server = self._runner.server
        try:
            if server is None:
                raise ConnectionAbortedError("the server has ended")
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            loop = asyncio.get_running_loop()
            if self._tls is None:
                await loop.connect_accepted_socket(server, connection)
            else:
                await loop.connect_accepted_socket(
                    server, connection, ssl=self._tls.context, ssl_handshake_timeout=HANDSHAKE_S
                )
        except OSError as error:
            connection.close()
            self._log.debug("connection ended before it was served", reason=str(error))

    def _accept_failed(self, listener: socket.socket, error: OSError) -> None:
        """Log it, and pause: the listener stays readable, so that trying again at once would only spin."""
        loop = asyncio.get_running_loop()
        self._failures += 1
        self._failed()
        if loop.time() - self._logged_s >= LOG_EVERY_S:
            self._log.error(
                "connections cannot be accepted",
                reason=error.strerror,
                failures=self._failures,
                descriptor_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            )
            self._logged_s = loop.time()
        loop.remove_reader(listener)
        self._pauses[listener] = loop.call_later(ACCEPT_PAUSE_S, self._again, listener)

    def _again(self, listener: socket.socket) -> None:
        del self._pauses[listener]
        asyncio.get_running_loop().add_reader(listener, self._accept, listener)


def listening(host: str, port: int) -> socket.socket:
    """Bind a TCP socket for a server to take; port 0 is any. Raises `OSError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
    except BaseException:
        listener.close()
        raise
    return listener
