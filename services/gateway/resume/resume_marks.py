"""The place of a client in a resumable stream: the `id:` of its events, and what `Last-Event-ID` means.

Of chunks (completions, chats):

    17          17 tokens of the only choice are in the events so far
    17,12e      of two choices; the second one has ended
    17e,u       the event with the usage too

Tokens are counted, as how many share an event depends on the moment, while their text does not. Another gateway renders
them again without sending them, and continues after them.

Of named events (responses, messages), which build on each other: their number, from 0 on. They are rendered token by
token, so that the number is the same on every gateway that renders the stream.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cohort.common.errors import RequestError
from cohort.services.gateway.generation.answering import Answering, Outlet, Step, Writer
from cohort.services.gateway.generation.delta import Delta, StreamKind
from cohort.services.gateway.http.service_headers import LAST_EVENT_HEADER

_PLACE = re.compile(r"(\d{1,9})(e?)", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_ASIDE = (b"event: ping\n", b"event: error\n", b"event: response.failed\n")
"""Events that are no place: when they come depends on the moment."""
_AT_ONCE = 64
"""Events written before other requests get the event loop."""


@dataclass(slots=True)
class Place:
    """Tokens by choice that a client has seen, the choices whose end it has seen, and whether it saw the usage."""

    tokens: list[int]
    ended: set[int] = field(default_factory=set)
    usage: bool = False

    @classmethod
    def parse(cls, text: str, choices: int) -> Place:
        """Parse a place; "" = nothing was seen. Raises a 400 `RequestError`."""
        place = cls([0] * choices)
        if not text:
            return place
        parts = text.split(",")
        if len(parts) == choices + 1 and parts[-1] == "u":
            place.usage = True
            parts.pop()
        found = [_PLACE.fullmatch(part) for part in parts]
        if len(parts) != choices or not all(found):
            raise _wrong_event_id()
        for index, match in enumerate(found):
            assert match is not None
            place.tokens[index] = int(match[1])
            if match[2]:
                place.ended.add(index)
        if place.usage and len(place.ended) < choices:
            raise _wrong_event_id()
        return place

    def __str__(self) -> str:
        parts = [f"{tokens}{'e' if index in self.ended else ''}" for index, tokens in enumerate(self.tokens)]
        return ",".join([*parts, "u"] if self.usage else parts)


Seen = Place | int
"""Part of a stream that a client has seen: up to a place among chunks, or to a named event's number, -1 = none."""


class MarkedWriter:
    """Chunks with an `id:`."""

    at_once = True

    def __init__(self, writer: Writer, answering: Answering, place: Place) -> None:
        """`place`: where its client is; kept up to date."""
        self._writer = writer
        self._answering = answering
        self._place = place

    def plain(self, index: int, text: str) -> bytes:
        return self._mark(index) + self._writer.plain(index, text)

    async def take(self, index: int, step: Step) -> list[bytes]:
        events = await self._writer.take(index, step)
        if index in self._answering.ended:
            self._place.ended.add(index)
        return [self._mark(index) + event for event in events]

    def keepalive(self) -> list[bytes]:
        return self._writer.keepalive()

    async def end(self) -> list[bytes]:
        *usage, done = await self._writer.end()
        if not usage or self._place.usage:
            return [done]
        self._place.usage = True
        return [self._id() + usage[0], done]

    def failed(self, error: RequestError) -> list[bytes]:
        return self._writer.failed(error)

    def _mark(self, index: int) -> bytes:
        self._place.tokens[index] = self._answering.choices[index].tokens
        return self._id()

    def _id(self) -> bytes:
        return b"id: %b\n" % str(self._place).encode()


class NumberedWriter:
    """Named events with an `id:`, without those that their client has seen."""

    def __init__(self, writer: Writer, answering: Answering, seen: int, max_tokens: int) -> None:
        """`seen`: number of the last event that was, -1 = none. `max_tokens`: those that may have been seen."""
        self._writer = writer
        self._answering = answering
        self._seen = seen
        self._max_tokens = max_tokens
        self._next = 0
        self._sent_any = False

    @property
    def at_once(self) -> bool:
        return self._next > self._seen

    def plain(self, index: int, text: str) -> bytes:
        self._next += 1
        return b"id: %d\n%b" % (self._next - 1, self._writer.plain(index, text))

    async def take(self, index: int, step: Step) -> list[bytes]:
        """Return the events not seen yet. Raises a 400 `RequestError` where the client claims more than there was."""
        before = self._next
        events = self._unseen(await self._writer.take(index, step))
        if before // _AT_ONCE != self._next // _AT_ONCE:
            await asyncio.sleep(0)
        return events

    def keepalive(self) -> list[bytes]:
        return self._unseen(self._writer.keepalive())

    async def end(self) -> list[bytes]:
        """Return the last events not seen yet. Raises as `take`."""
        events = self._unseen(await self._writer.end())
        if self._next <= self._seen:
            raise _wrong_event_id()
        return events if self._sent_any else [b": all of it was seen\n\n"]

    def failed(self, error: RequestError) -> list[bytes]:
        return self._unseen(self._writer.failed(error))

    def _unseen(self, events: Sequence[bytes]) -> list[bytes]:
        unseen = []
        for event in events:
            if event.startswith(_ASIDE):
                if self._next > self._seen:
                    unseen.append(event)
                continue
            if self._next > self._seen:
                unseen.append(b"id: %d\n%b" % (self._next, event))
            elif self._answering.choices[0].tokens > self._max_tokens:
                raise _wrong_event_id()
            self._next += 1
        self._sent_any = self._sent_any or bool(unseen)
        return unseen


class AfterPlace(Outlet):
    """Filter that renders what precedes a client's place without sending it, and passes on the rest."""

    def __init__(self, answering: Answering, place: Place) -> None:
        super().__init__()
        self._target = answering
        self._missing = list(place.tokens)
        self._unended = set(place.ended)
        for index in place.ended:
            self._reach_end(index)

    def put(self, delta: Delta) -> None:
        index, answering = delta.index, self._target
        if index in answering.ended:
            return
        seen = min(self._missing[index], len(delta.tokens))
        if seen:
            self._missing[index] -= seen
            answering.next(Delta(index, delta.tokens[:seen], delta.logprobs[:seen]))
            delta = Delta(index, delta.tokens[seen:], delta.logprobs[seen:], delta.finish, delta.error)
            self._reach_end(index)
        if index in answering.ended:
            super().put(Delta(index))  # there may be nothing more to wait for
        elif delta.tokens or delta.finish is not None or delta.error is not None:
            super().put(delta)

    def put_tokens(self, index: int, tokens: list[int]) -> None:
        if self._missing[index]:
            self.put(Delta(index, tokens))
        else:
            super().put_tokens(index, tokens)

    def _reach_end(self, index: int) -> None:
        if index in self._unended and not self._missing[index]:
            self._unended.discard(index)
            self._target.ended.add(index)
            self._target.stop(index)


def parse_last_event_id(kind: StreamKind, choices: int, text: str) -> Seen:
    """Return what a client has seen; "" = nothing. Raises a 400 `RequestError`."""
    if kind == "chunks":
        return Place.parse(text, choices)
    if not text:
        return -1
    if not _NUMBER.fullmatch(text):
        raise _wrong_event_id()
    return int(text)


def resuming_writer(
    answering: Answering, writer: Writer, deltas: Mapping[int, Delta], seen: Seen, *, may_be_ahead: bool = False
) -> Writer:
    """Put `deltas` into a new answering; return the writer that adds ids to its events and skips those `seen`.
    Raises a 400 `RequestError` for more than the deltas have, unless the client `may_be_ahead` of them."""
    requests = [entry.request for entry in answering.generation.entries]
    max_tokens = [
        request.sampling.max_tokens if may_be_ahead else len(deltas[index].tokens if index in deltas else ())
        for index, request in enumerate(requests)
    ]
    if isinstance(seen, int):
        answering.token_by_token = True
        writer = NumberedWriter(writer, answering, seen, max_tokens[0])
    elif any(tokens > limit for tokens, limit in zip(seen.tokens, max_tokens, strict=True)):
        raise _wrong_event_id()
    else:
        if any(seen.tokens) or seen.ended:
            answering.outlet = AfterPlace(answering, seen)
        writer = MarkedWriter(writer, answering, seen)
    for delta in deltas.values():
        answering.outlet.put(delta)
    return writer


def _wrong_event_id() -> RequestError:
    return RequestError(
        f"{LAST_EVENT_HEADER}: send the id of the last event that came in this stream, or leave it out for all of it.",
        param=LAST_EVENT_HEADER,
    )
