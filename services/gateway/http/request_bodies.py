"""Reads the bodies of requests: in time, within their size, and all together within a budget.

    415 Content-Encoding, or no JSON     413 longer than one may be     408 too slow     429 too much in flight

Called by `generator.py` for generation requests, and by `middleware.py` for what headers alone decide. A body counts
against the budget from its first byte until its request is accepted or refused, because until then its text lies in
memory at least once. Never parses.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError

RETRY_S = 1.0
"""Of a body that found the budget used up: bodies are in flight for about as long."""
_FORMS = ("/v1/files",)
"""POST bodies that are no JSON."""


@web.middleware
async def refuse_other_bodies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Bodies that nothing here reads: compressed ones, and other types where JSON is expected.

    A page in a browser may send other types than JSON to any server without asking it first (a "simple" request), so
    this is also what keeps foreign pages out where the browser names no origin.
    """
    if request.body_exists and request.match_info.http_exception is None:
        _check_encoding(request)
        if request.method == "POST" and request.path not in _FORMS:
            _check_type(request)
    return await handler(request)


def expecting_later(route: web.RouteDef) -> web.RouteDef:
    """Without aiohttp's own answer to `Expect: 100-continue`, which invites a body before anything looks at the
    headers; `invite_bodies` does it."""
    return web.RouteDef(route.method, route.path, route.handler, {**route.kwargs, "expect_handler": _expected})


async def _expected(request: web.Request) -> None:
    """Raises a 417 for any other expectation."""
    if request.headers["Expect"].strip().lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect: 100-continue, or nothing.")


@web.middleware
async def invite_bodies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Behind all that refuses by headers: only now a client that waits for it sends its body."""
    asked = "Expect" in request.headers and request.version >= HttpVersion11
    if asked and request.match_info.http_exception is None and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return await handler(request)


def _check_encoding(request: web.Request) -> None:
    encoding = request.headers.get("Content-Encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise RequestError("Content-Encoding: bodies are read as they are; send them uncompressed.", status=415)


def _check_type(request: web.Request) -> None:
    given = request.content_type.lower() if "Content-Type" in request.headers else ""
    if given != "application/json" and not (given.startswith("application/") and given.endswith("+json")):
        raise RequestError(
            "Content-Type must be application/json; with curl, add -H 'Content-Type: application/json'.", status=415
        )


@dataclass(slots=True)
class _Held:
    """One body's part of the budget."""

    bytes: int = 0


class RequestBodies:
    """The budget of all bodies in flight of one gateway."""

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._largest = min(config.max_body_bytes, config.max_bodies_bytes)
        self.in_flight_bytes = 0

    @asynccontextmanager
    async def reading(self, request: web.Request) -> AsyncIterator[bytes]:
        """The body, which counts as in flight until the block ends. Raises `RequestError` as the module says."""
        if (request.content_length or 0) > self._largest:
            raise self._too_large()
        held = _Held()
        try:
            yield await self._read(request, held)
        finally:
            self.in_flight_bytes -= held.bytes

    async def _read(self, request: web.Request, held: _Held) -> bytes:
        content, loop = request.content, asyncio.get_running_loop()
        idle_s, whole_s = self._config.body_timeout_s, self._config.body_deadline_s
        ends_s = loop.time() + whole_s
        body = bytearray()  # not a list of chunks: a client that sends single bytes decides how many there are
        try:
            async with asyncio.timeout_at(min(loop.time() + idle_s, ends_s)) as deadline:
                while chunk := await content.readany():
                    self._take(held, len(chunk))
                    body += chunk
                    deadline.reschedule(min(loop.time() + idle_s, ends_s))
        except TimeoutError as error:
            late = loop.time() >= ends_s
            what = "is not complete after" if late else "has not moved for"
            limit = f"gateway.body_deadline_s {whole_s:g}" if late else f"gateway.body_timeout_s {idle_s:g}"
            raise RequestError(f"The body {what} {limit} seconds.", status=408, type_="timeout_error") from error
        except web.RequestPayloadError as error:
            raise RequestError(f"The body cannot be read: {error}") from error
        return bytes(body)

    def _take(self, held: _Held, count: int) -> None:
        """`count` bytes more of a body have arrived."""
        if held.bytes + count > self._largest:
            raise self._too_large()
        if self.in_flight_bytes + count > self._config.own_bodies_bytes:
            raise RequestError(
                f"{self.in_flight_bytes} bytes of other requests are being read, gateway.max_bodies_bytes is "
                f"{self._config.own_bodies_bytes}{self._config.of_all}. Please retry later.",
                status=429,
                type_="rate_limit_error",
                retry_after_s=RETRY_S,
            )
        held.bytes += count
        self.in_flight_bytes += count

    def _too_large(self) -> RequestError:
        config = self._config
        name = "max_body_bytes" if config.max_body_bytes <= config.max_bodies_bytes else "max_bodies_bytes"
        return RequestError(f"The body is larger than {self._largest} bytes (gateway.{name}).", status=413)
