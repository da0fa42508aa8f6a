"""The end of a gateway whose port another one takes over (`cohort restart`): no connection ends amid a request.

    SIGUSR1 ─▶ accept nothing more ─▶ each response says `Connection: close` ─▶ nothing asked for a second ─▶ drain

A client that was told so opens its next connection, which waits at the port for the other process. A client that keeps
a connection open without a request finds it closed, as ever. Called by `service`, which stops accepting.
"""

from __future__ import annotations

import asyncio
import signal
import threading

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

QUIET_S = 1.0
"""Without a request, until open connections count as idle: a client that answers a response with another request does
so within it."""
_POLL_S = 0.05
SIGNAL = signal.SIGUSR1


class Handover:
    def __init__(self, stopping: asyncio.Event) -> None:
        """`stopping` is set when another process is to take over."""
        self._stopping = stopping
        self.asked = False
        self._running = 0
        self._ended_s = float("-inf")

    def listen(self) -> None:
        """From now on the signal asks for it. On the running loop; only that of the main thread hears signals."""
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(SIGNAL, self._ask)

    def middleware(self) -> Middleware:
        """Counts the requests that run."""

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
        """For `on_response_prepare`: the connection ends with this response."""
        if self.asked:
            response.force_close()
            response.headers["Connection"] = "close"

    async def quiet(self, timeout_s: float) -> None:
        """Until no request has run for `QUIET_S`."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        while (now_s := loop.time()) < began_s + timeout_s:
            if not self._running and now_s - max(began_s, self._ended_s) >= QUIET_S:
                return
            await asyncio.sleep(_POLL_S)

    def _ask(self) -> None:
        self.asked = True
        self._stopping.set()
