"""How a resumable stream is written, and written on: as chunks (completions, chats) or as named events.

A `Form` is one stream's, whichever connection reads it; a `Reader` is one connection's, at its place. Used by
`resumption.py`; the APIs make the forms of their streams. `resume_marks.py` has the places.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.services.gateway.generation.answering import Answering
from cohort.services.gateway.generation.delta import Delta, Mailbox
from cohort.services.gateway.http.sse import Events, EventStream
from cohort.services.gateway.requests.parsing import Call
from cohort.services.gateway.resume.resume_marks import MarkedStream, NumberedStream, Place, Unread, number_seen, unseen
from cohort.services.gateway.resume.resume_store import Ending, Kind, StreamRecord


@dataclass(frozen=True, slots=True)
class Connection:
    """A client that wants the rest, and the headers it is answered with."""

    request: web.Request
    headers: Mapping[str, str]
    write_timeout_s: float
    log: structlog.stdlib.BoundLogger


class Reader(Protocol):
    @property
    def started(self) -> bool:
        """Its client has the headers."""

    def unseen(
        self, answering: Answering, log: Mapping[int, Delta], *, gaps: bool, ended: Callable[[int], None]
    ) -> Mailbox:
        """What of the log its client has not seen, for `answering`, of which nothing is rendered yet. `gaps`: the log
        may lack what was seen, and its tokens come again. `ended` is told of choices whose end was seen. Raises a 400
        `RequestError`, and nothing has changed then."""

    async def stream(self, connection: Connection, answering: Answering) -> web.StreamResponse:
        """Until the end, or that of the connection. Raises a `RequestError` as long as nothing was sent."""


class Form(Protocol):
    @property
    def kind(self) -> Kind: ...

    def beside(self) -> bytes:
        """What is kept beside the body of its request."""

    def reader(self, last_event_id: str) -> Reader:
        """ "" = nothing was seen. Raises a 400 `RequestError`."""

    async def unread(self, answering: Answering) -> None:
        """To the end, for no client."""

    def complete(self, answering: Answering) -> bool:
        """All of it was written, and what has to be done at its end is done."""

    def ending(self, cached_tokens: list[int], error: RequestError | None) -> Ending: ...


class Resumable(Protocol):
    """An API whose streams can be resumed."""

    async def restored(self, record: StreamRecord, owner: str, ending: Ending | None) -> tuple[Call, Form]:
        """Of a stream that was written down, and of its end if it has one. Raises `RequestError`."""


def ending_of(cached_tokens: list[int], error: RequestError | None) -> Ending:
    if error is None:
        return Ending(cached_tokens)
    return Ending(cached_tokens, error.message, error.status, error.type_)


# -- Chunks ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ChunkForm:
    """`carry`: all that is unseen, as a whole answer to a request; `send`: the same to anything that takes chunks."""

    choices: int
    carry: Callable[[Answering, EventStream], Awaitable[web.StreamResponse]]
    send: Callable[[Events, Answering], Awaitable[None]]

    @property
    def kind(self) -> Kind:
        return "chunks"

    def beside(self) -> bytes:
        return b""

    def reader(self, last_event_id: str) -> Reader:
        return _ChunkReader(self, Place.parse(last_event_id, self.choices))

    async def unread(self, answering: Answering) -> None:
        await self.send(Unread(), answering)

    def complete(self, answering: Answering) -> bool:
        return len(answering.ended) == len(answering.choices)

    def ending(self, cached_tokens: list[int], error: RequestError | None) -> Ending:
        return ending_of(cached_tokens, error)


@dataclass(slots=True)
class _ChunkReader:
    form: ChunkForm
    place: Place
    started: bool = False

    def unseen(
        self, answering: Answering, log: Mapping[int, Delta], *, gaps: bool, ended: Callable[[int], None]
    ) -> Mailbox:
        requests = [entry.request for entry in answering.generation.entries]
        most = [
            request.sampling.max_tokens if gaps else len(log[index].tokens if index in log else ())
            for index, request in enumerate(requests)
        ]
        return unseen(answering, log, self.place, most=most, ended=ended)

    async def stream(self, connection: Connection, answering: Answering) -> web.StreamResponse:
        events = MarkedStream(
            connection.request,
            connection.headers,
            answering,
            self.place,
            write_timeout_s=connection.write_timeout_s,
            log=connection.log,
        )
        try:
            return await self.form.carry(answering, events)
        finally:
            self.started = events.started


# -- Named events ------------------------------------------------------------------------------------------------------


class NamedEvents(Protocol):
    """Where they go."""

    async def send_named(self, *events: tuple[str, msgspec.Struct]) -> None: ...

    async def end(self) -> None: ...


class Rendering(Protocol):
    """One rendering of one answer."""

    async def send(self, events: NamedEvents) -> None:
        """All of it. Raises the `RequestError` that the answer failed with."""

    async def fail(self, events: NamedEvents, error: RequestError) -> None:
        """The end, in the words of its API."""


class NamedForm:
    """Of an answer of one choice. Its API says what a rendering is, and derives where more is to be kept."""

    def __init__(self, kind: Kind, rendering: Callable[[Answering], Rendering]) -> None:
        self._kind = kind
        self._rendering = rendering

    @property
    def kind(self) -> Kind:
        return self._kind

    def beside(self) -> bytes:
        return b""

    def reader(self, last_event_id: str) -> Reader:
        return _NamedReader(self, number_seen(last_event_id))

    async def unread(self, answering: Answering) -> None:
        await self.rendered(answering).send(Unread())

    def complete(self, answering: Answering) -> bool:
        return len(answering.ended) == len(answering.choices)

    def ending(self, cached_tokens: list[int], error: RequestError | None) -> Ending:
        return ending_of(cached_tokens, error)

    def rendered(self, answering: Answering) -> Rendering:
        answering.singly = True
        return self._rendering(answering)


@dataclass(slots=True)
class _NamedReader:
    form: NamedForm
    seen: int
    started: bool = False
    most_tokens: int = 0

    def unseen(
        self, answering: Answering, log: Mapping[int, Delta], *, gaps: bool, ended: Callable[[int], None]
    ) -> Mailbox:
        """All of it: events are left out when they are written."""
        mailbox = Mailbox()
        for said in log.values():
            mailbox.put(said.index, tokens=said.tokens, logprobs=said.logprobs, finish=said.finish, error=said.error)
        [entry] = answering.generation.entries
        self.most_tokens = entry.request.sampling.max_tokens if gaps else len(log[0].tokens if 0 in log else ())
        return mailbox

    async def stream(self, connection: Connection, answering: Answering) -> web.StreamResponse:
        events = NumberedStream(
            connection.request,
            connection.headers,
            answering,
            self.seen,
            most_tokens=self.most_tokens,
            write_timeout_s=connection.write_timeout_s,
            log=connection.log,
        )
        rendering = self.form.rendered(answering)
        try:
            return await events.carry(rendering.send(events), lambda error: rendering.fail(events, error))
        finally:
            self.started = events.started
