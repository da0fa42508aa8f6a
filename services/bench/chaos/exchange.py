"""One HTTP exchange as one client has it: sent, read in the manner that is asked for, its ending told.

A reader may read at once, slowly, stop reading, or leave: before the answer, or amid the stream. Never judges an ending
(`accounts`), and never raises for what a server does. Called by `users`.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ParamSpec

import aiohttp

from cohort.services.bench.chaos.answer_content import AnswerContent, Api, Reader, StreamFailed, whole

P = ParamSpec("P")
ANSWER_TIMEOUT_S = 180.0
"""A client that waits longer gives up; that is never accounted for as right."""


@dataclass(frozen=True, slots=True)
class Answered:
    """`events_s`: when each event of a stream came, of the monotonic clock."""

    answer_content: AnswerContent
    events_s: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Replied:
    """An answer that is no generation: a status below 400, and its JSON if it was any."""

    status: int
    body: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """A status from 400 on; `message` is the error's own, "" where the body has none."""

    status: int
    message: str


@dataclass(frozen=True, slots=True)
class Failed:
    """An error event within the stream."""

    message: str


@dataclass(frozen=True, slots=True)
class Broken:
    """The connection was refused, or ended before the answer did."""

    reason: str


@dataclass(frozen=True, slots=True)
class Left:
    """End by the client's own choice."""


@dataclass(frozen=True, slots=True)
class Silent:
    """End without a byte for `ANSWER_TIMEOUT_S`."""


Ending = Answered | Replied | Refused | Failed | Broken | Left | Silent


@dataclass(slots=True)
class Manner:
    """Pace of a client's reading. `leave_after_events` 0: before the answer, after `leave_s`; None: never."""

    stream: bool = True
    leave_after_events: int | None = None
    leave_s: float = 0.0
    pause_s: float = 0.0
    """Pause between two reads of a few bytes."""
    stall_after_events: int | None = None
    """Events after which it stops reading, and waits `leave_s`."""


@dataclass(slots=True)
class Stream:
    """State that a client of a resumable stream keeps from one connection to the next."""

    reader: Reader
    token: str = ""
    last_id: str = ""
    times_s: list[float] = field(default_factory=list)
    """Times of each event, of the monotonic clock."""


def session(key: str, *, keep_alive: bool, small_buffers: bool = False) -> aiohttp.ClientSession:
    """Return a client's own connections. With small buffers a server soon notices a reader that is slow."""
    connector = (
        aiohttp.TCPConnector(limit=0, keepalive_timeout=20)
        if keep_alive
        else aiohttp.TCPConnector(limit=0, force_close=True)
    )
    return aiohttp.ClientSession(
        connector=connector,
        timeout=aiohttp.ClientTimeout(total=ANSWER_TIMEOUT_S),
        headers={"Authorization": f"Bearer {key}"},
        read_bufsize=512 if small_buffers else 1 << 16,
    )


def _ended(call: Callable[P, Awaitable[Ending]]) -> Callable[P, Coroutine[Any, Any, Ending]]:
    """Wrap a call so that a broken connection and an unreadable answer are endings, too."""

    @functools.wraps(call)
    async def ended(*args: P.args, **kwargs: P.kwargs) -> Ending:
        try:
            return await call(*args, **kwargs)
        except (aiohttp.ClientError, ConnectionError) as error:
            return Broken(f"{type(error).__name__}: {error}")
        except TimeoutError:
            return Silent()
        except (StreamFailed, KeyError, TypeError, ValueError) as error:
            return Failed(f"{type(error).__name__}: {error}")

    return ended


async def generate(http: aiohttp.ClientSession, url: str, api: Api, body: Mapping[str, Any], manner: Manner) -> Ending:
    task = asyncio.create_task(_exchange(http, url, api, body, manner))
    if manner.leave_after_events == 0:
        done, _ = await asyncio.wait([task], timeout=manner.leave_s)
        if not done:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            return Left()
    return await task


@_ended
async def _exchange(http: aiohttp.ClientSession, url: str, api: Api, body: Mapping[str, Any], manner: Manner) -> Ending:
    async with http.post(url + api, json={**body, "stream": True} if manner.stream else body) as response:
        if response.status != 200:
            return await _refused(response)
        if not manner.stream:
            return Answered(whole(api, await response.json()))
        return await _follow(response, Stream(Reader(api)), manner)


@_ended
async def follow_resumed(
    http: aiohttp.ClientSession, url: str, stream: Stream, manner: Manner, first: tuple[str, Mapping[str, Any]] | None
) -> Ending:
    """Read one connection of a resumable stream: the first with `first` (path and body), later ones by its token."""
    if first is not None:
        path, body = first
        request = http.post(url + path, json={**body, "stream": True}, headers={"x-cohort-resume": "keep"})
    else:
        request = http.get(
            f"{url}/v1/streams/{stream.token}", headers={"Last-Event-ID": stream.last_id} if stream.last_id else {}
        )
    async with request as response:
        if response.status != 200:
            return await _refused(response)
        stream.token = response.headers.get("x-cohort-resume", stream.token)
        return await _follow(response, stream, manner)


@_ended
async def send(http: aiohttp.ClientSession, method: str, url: str, **how: Any) -> Ending:
    async with http.request(method, url, **how) as response:
        if response.status >= 400:
            return await _refused(response)
        data = await response.read()
        try:
            return Replied(response.status, json.loads(data))
        except ValueError:  # a page, metrics
            return Replied(response.status, None)


async def half_a_body(host: str, port: int, key: str, wait_s: float) -> Ending:
    """Send headers that promise more than follows, wait, then end the connection."""
    try:
        _, writer = await asyncio.open_connection(host, port)
    except OSError as error:
        return Broken(f"{type(error).__name__}: {error}")
    head = f"POST {Api.CHAT} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {key}\r\n"
    writer.write(f'{head}Content-Type: application/json\r\nContent-Length: 4000\r\n\r\n{{"messages": ['.encode())
    await asyncio.sleep(wait_s)
    writer.transport.abort()
    return Left()


async def _refused(response: aiohttp.ClientResponse) -> Refused:
    try:
        error = (await response.json()).get("error")
        message = error if isinstance(error, str) else error["message"]
    except (ValueError, KeyError, TypeError, AttributeError, aiohttp.ContentTypeError):
        message = ""
    return Refused(response.status, message)


async def _follow(response: aiohttp.ClientResponse, stream: Stream, manner: Manner) -> Ending:
    """Read until the stream reports its end, or the client leaves."""
    events = 0
    async for identity, data in _events(response, manner):
        stream.times_s.append(time.monotonic())
        stream.reader.take(data)
        stream.last_id = identity or stream.last_id
        events += 1
        if stream.reader.done:
            return Answered(stream.reader.content(), stream.times_s)
        if manner.leave_after_events is not None and events >= manner.leave_after_events:
            response.close()
            return Left()
        if manner.stall_after_events is not None and events >= manner.stall_after_events:
            await asyncio.sleep(manner.leave_s)
            response.close()
            return Left()
    return Broken("the stream ended without its last event")


async def _events(response: aiohttp.ClientResponse, manner: Manner) -> AsyncIterator[tuple[str, str]]:
    """Yield (id, data) of each complete event; comments and names are skipped."""
    rest, identity, data = b"", "", ""
    while piece := await (response.content.read(160) if manner.pause_s else response.content.readany()):
        if manner.pause_s:
            await asyncio.sleep(manner.pause_s)
        *lines, rest = (rest + piece).split(b"\n")
        for raw in lines:
            line = raw.rstrip(b"\r").decode()
            if line.startswith("id:"):
                identity = line[3:].strip()
            elif line.startswith("data:"):
                data = line[5:].strip()
            elif not line and data:
                yield identity, data
                identity, data = "", ""
