"""Reads the bodies of requests: in time, within their size, of few values, and all together within a budget.

    415 Content-Encoding, or no JSON     413 longer than one may be     408 too slow     429 too much in flight

Called by `generator.py`, by `responses_api.py` and `resumption.py` for what they read from a store, and by aiohttp for
what headers decide. A body counts from its first byte until its request is accepted or refused, as its text lies in
memory till then; what the request names in a store counts as long. Never parses.

`refuse_shape` comes before every decoder: a megabyte of empty lists becomes half a million objects, a hundred
milliseconds and a hundred megabytes. So bytes outside of strings are counted, at memory speed: a slice at a time,
because no other thread runs during a count, and no further than to the limit. Whether the body is JSON is left to the
decoder, which stops at the first fault.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from aiohttp import HttpVersion11, web
from aiohttp.typedefs import Handler

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError, busy
from cohort.services.gateway import bounds

_LEAST = 4
"""Largest bodies that fit into the part of one gateway of many: one, a conversation as long, and the response before,
which repeats instructions."""
RETRY_S = 1.0
"""Wait of a client whose body exceeds the budget: bodies are in flight for about as long."""
_FORMS = ("/v1/files",)
"""POST bodies that are no JSON."""
SLICE_BYTES = 1 << 17
"""Bytes counted at a time: a tenth of a millisecond, a whole one at worst."""
# A chat message in its longest form: the message, its list of parts, two parts.
_CONTAINERS_PER_MESSAGE = 4
# Keys and values of a message in that form.
_STRINGS_PER_MESSAGE = 16
# Beside messages, prompts, biases and metadata: the body itself, its options, what is tolerated.
_OTHERS = 1024
# Of a schema's text, or of tools', per text, key or value in it.
_BYTES_PER_SCHEMA_VALUE = 8
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OPENING = frozenset(b"[{")


@web.middleware
async def refuse_other_bodies(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse bodies that nothing here reads: compressed ones, and other types where JSON is expected.

    A page in a browser may send other types than JSON to any server without asking it first (a "simple" request), so
    this is also what keeps foreign pages out where the browser names no origin.
    """
    if request.body_exists and request.match_info.http_exception is None:
        _check_encoding(request)
        if request.method == "POST" and request.path not in _FORMS:
            _check_type(request)
    return await handler(request)


def expecting_later(route: web.RouteDef) -> web.RouteDef:
    """Return the route without aiohttp's answer to `Expect: 100-continue`, which comes before headers are checked."""
    return web.RouteDef(route.method, route.path, route.handler, {**route.kwargs, "expect_handler": _expected})


async def _expected(request: web.Request) -> None:
    """Raise a 417 for any other expectation."""
    if request.headers["Expect"].strip().lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect: 100-continue, or nothing.")


@web.middleware
async def send_continue(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Send "100 Continue" to a client that holds its body back, after all that refuses by headers."""
    expected = "Expect" in request.headers and request.version >= HttpVersion11
    if expected and request.match_info.http_exception is None and request.transport is not None:
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


Take = Callable[[int], None]
"""Function that counts bytes as in flight before they are read. Raises a 429 `RequestError` beyond the budget."""


def most_in_flight(config: GatewayConfig) -> int:
    """Return the bytes of bodies at one gateway: its part, and at least `_LEAST` of the largest."""
    whole = bounds.BOUNDS.bodies * config.max_body_bytes
    return max(min(whole, _LEAST * config.max_body_bytes), -(-whole // config.processes))


class RequestBodies:
    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self.in_flight_bytes = 0

    @asynccontextmanager
    async def reading(self, request: web.Request) -> AsyncIterator[bytes]:
        """Read the body, which counts as in flight until the block ends. Raises `RequestError` as the module says."""
        if (request.content_length or 0) > self._config.max_body_bytes:
            raise self._too_large()
        with self.holding() as take:
            yield await self._read(request, take)

    @contextmanager
    def holding(self, own: int = 0) -> Iterator[Take]:
        """Yield a function that counts bytes as in flight until the block ends. `own`: bytes of the same request that
        are in flight already. What is in flight alone is never refused: it could not succeed later either."""
        held = 0

        def take(count: int) -> None:
            nonlocal held
            if self.in_flight_bytes > own + held:
                self._refuse_beyond(count)
            self.in_flight_bytes += count
            held += count

        try:
            yield take
        finally:
            self.in_flight_bytes -= held

    async def _read(self, request: web.Request, take: Take) -> bytes:
        content, loop = request.content, asyncio.get_running_loop()
        idle_s, whole_s = bounds.BOUNDS.body_idle_s, bounds.BOUNDS.body_whole_s
        ends_s = loop.time() + whole_s
        body = bytearray()  # not a list of chunks: a client that sends single bytes decides how many there are
        try:
            async with asyncio.timeout_at(min(loop.time() + idle_s, ends_s)) as deadline:
                while chunk := await content.readany():
                    if len(body) + len(chunk) > self._config.max_body_bytes:
                        raise self._too_large()
                    take(len(chunk))
                    body += chunk
                    deadline.reschedule(min(loop.time() + idle_s, ends_s))
        except TimeoutError as error:
            late = loop.time() >= ends_s
            what = f"is not complete after {whole_s:g}" if late else f"has not moved for {idle_s:g}"
            raise RequestError(f"The body {what} seconds.", status=408, type_="timeout_error") from error
        except web.RequestPayloadError as error:
            raise RequestError(f"The body cannot be read: {error}") from error
        return bytes(body)

    def _refuse_beyond(self, count: int) -> None:
        if self.in_flight_bytes + count > (most := most_in_flight(self._config)):
            raise busy(
                f"{self.in_flight_bytes} bytes of other requests are being read, of {most}{self._config.of_all} "
                f"({bounds.BOUNDS.bodies} × gateway.max_body_bytes). Please retry later.",
                RETRY_S,
            )

    def _too_large(self) -> RequestError:
        most = self._config.max_body_bytes
        return RequestError(f"The body is larger than {most} bytes (gateway.max_body_bytes).", status=413)


@dataclass(frozen=True, slots=True)
class _Limits:
    strings: int
    containers: int
    values: int
    depth: int
    what: str
    """Name of what the strings and containers are for, with its limit."""

    @classmethod
    def of(cls, config: GatewayConfig, *, chat: bool) -> _Limits:
        own = bounds.BOUNDS
        messages = own.messages if chat else 0
        schemas = own.grammar_bytes // _BYTES_PER_SCHEMA_VALUE
        return cls(
            strings=_STRINGS_PER_MESSAGE * messages + own.choices + own.logit_biases + schemas + _OTHERS,
            containers=_CONTAINERS_PER_MESSAGE * messages + own.choices + schemas // 2 + _OTHERS,
            values=config.max_request_work + _STRINGS_PER_MESSAGE * messages + schemas + _OTHERS,
            depth=own.nesting,
            what=f"those of {messages} messages, tools, schemas and options"
            if chat
            else f"those of {own.choices} prompts, {own.logit_biases} biases, schemas and options",
        )


def refuse_shape(data: bytes, config: GatewayConfig, *, chat: bool) -> None:
    """Raise `RequestError` for a body with more values, or deeper ones, than any request of its endpoint may have."""
    limits = _Limits.of(config, chat=chat)
    quotes = containers = values = depth = 0
    cut = b""
    for start in range(0, len(data), SLICE_BYTES):
        text = cut + data[start : start + SLICE_BYTES]
        # A backslash without what it escapes belongs to the next slice.
        cut = b"\\" * ((len(text) - len(text.rstrip(b"\\"))) % 2)
        text = text[: len(text) - len(cut)]
        plain = text.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in text else text
        in_string = quotes % 2
        quotes += plain.count(b'"')
        if quotes // 2 > limits.strings:
            raise _too_many("texts and keys", limits.strings, limits.what)
        outside = b"".join(plain.split(b'"')[in_string::2])
        brackets = outside.translate(None, _NOT_BRACKETS)
        containers += brackets.count(b"{") + brackets.count(b"[")
        if containers > limits.containers:
            raise _too_many("lists and objects", limits.containers, limits.what)
        values += outside.count(b",")
        if values > limits.values:
            what = f"token ids of prompts (gateway.max_request_work: {config.max_request_work}), messages and options"
            raise _too_many("values", limits.values, what)
        depth = _depth_after(brackets, depth, limits.depth)
        if depth < 0:  # the decoder ends there
            return


def _too_many(what: str, most: int, of_which: str) -> RequestError:
    return RequestError(f"The body has more than {most} {what}, the most that are read: {of_which}.")


def _depth_after(brackets: bytes, depth: int, most: int) -> int:
    """Return the depth, negative as soon as more is closed than was opened."""
    for bracket in brackets:
        depth += 1 if bracket in _OPENING else -1
        if depth > most:
            raise RequestError(f"The body is nested too deeply: lists and objects may lie {most} deep.")
        if depth < 0:
            break
    return depth
