"""The place of a client in a resumable stream: the `id:` of its events, and what `Last-Event-ID` means.

Of chunks (completions, chats):

    17          17 tokens of the only choice are in the events so far
    17,12e      of two choices; the second one has ended
    17e,u       the event with the usage too

Tokens rather than events are counted: how many tokens share a chunk depends on the moment, while what the first 17
tokens of a choice came to does not. Another gateway renders them again, unseen, and goes on behind them.

Of named events (responses, messages), which build on each other: their number, from 0 on. These are rendered token by
token, so an event has its number wherever it is written again, and those that were seen are left out.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.common.messages import TokenLogprob
from cohort.common.types import FinishReason
from cohort.services.gateway.generation.answering import Answering
from cohort.services.gateway.generation.delta import Delta, Mailbox
from cohort.services.gateway.generation.openai_shapes import Answer
from cohort.services.gateway.http.sse import EventStream

LAST_EVENT_HEADER = "Last-Event-ID"
_PLACE = re.compile(r"(\d{1,9})(e?)", re.ASCII)
_NUMBER = re.compile(r"\d{1,9}", re.ASCII)
_ASIDE = ("ping", "error", "response.failed")
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
        """ "" = nothing was seen. Raises a 400 `RequestError`."""
        place = cls([0] * choices)
        if not text:
            return place
        parts = text.split(",")
        if len(parts) == choices + 1 and parts[-1] == "u":
            place.usage = True
            parts.pop()
        found = [_PLACE.fullmatch(part) for part in parts]
        if len(parts) != choices or not all(found):
            raise _foreign()
        for index, match in enumerate(found):
            assert match is not None
            place.tokens[index] = int(match[1])
            if match[2]:
                place.ended.add(index)
        if place.usage and len(place.ended) < choices:
            raise _foreign()
        return place

    def __str__(self) -> str:
        parts = [f"{tokens}{'e' if index in self.ended else ''}" for index, tokens in enumerate(self.tokens)]
        return ",".join([*parts, "u"] if self.usage else parts)


class MarkedStream(EventStream):
    """Events with an `id:`."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        answering: Answering,
        place: Place,
        *,
        write_timeout_s: float,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        """`place`: where its client is; kept up to date."""
        super().__init__(request, headers, write_timeout_s=write_timeout_s, log=log)
        self._answering = answering
        self._place = place

    def mark(self, index: int) -> bytes:
        self._place.tokens[index] = self._answering.choices[index].tokens
        return self._id()

    async def send(self, event: msgspec.Struct | dict[str, Any]) -> None:
        place = self._place
        if isinstance(event, Answer) and event.choices:
            for choice in event.choices:
                place.tokens[choice.index] = self._answering.choices[choice.index].tokens
                if choice.index in self._answering.ended:
                    place.ended.add(choice.index)
        elif place.usage:
            return  # seen
        else:
            place.usage = True
        await self._write(self._id() + self.framed(event))

    def _id(self) -> bytes:
        return b"id: %b\n" % str(self._place).encode()


class NumberedStream(EventStream):
    """Named events with an `id:`, without those that its client has seen."""

    def __init__(
        self,
        request: web.Request,
        headers: Mapping[str, str],
        answering: Answering,
        seen: int,
        *,
        most_tokens: int,
        write_timeout_s: float,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        """`seen`: number of the last event that was, -1 = none. `most_tokens`: those that may have been seen."""
        super().__init__(request, headers, write_timeout_s=write_timeout_s, log=log)
        self._answering = answering
        self._seen = seen
        self._most_tokens = most_tokens
        self._next = 0

    async def send_named(self, *events: tuple[str, msgspec.Struct]) -> None:
        """Raises a 400 `RequestError` where more is said to be seen than there was."""
        parts = []
        for name, event in events:
            said = b"event: %b\n%b" % (name.encode(), self.framed(event))
            if name in _ASIDE:
                if self._next > self._seen:
                    parts.append(said)
                continue
            if self._next > self._seen:
                parts.append(b"id: %d\n%b" % (self._next, said))
            elif self._answering.choices[0].tokens > self._most_tokens:
                raise _foreign()
            self._next += 1
            if self._next % _AT_ONCE == 0:
                await asyncio.sleep(0)
        if parts:
            await self._write(b"".join(parts))

    async def end(self) -> None:
        """Raises as `send_named`."""
        if self._next <= self._seen:
            raise _foreign()
        if not self.started:
            await self._write(b": all of it was seen\n\n")
        await super().end()


class Unread:
    """Takes events for which there is no client."""

    def __init__(self) -> None:
        self._count = 0

    async def send(self, event: msgspec.Struct | dict[str, Any]) -> None:
        pass

    async def done(self) -> None:
        pass

    async def send_named(self, *events: tuple[str, msgspec.Struct]) -> None:
        self._count += 1
        if self._count % _AT_ONCE == 0:
            await asyncio.sleep(0)

    async def end(self) -> None:
        pass


class BehindPlace(Mailbox):
    """Hands on what is behind a client's place; what is put before it is rendered, to nowhere."""

    def __init__(self, answering: Answering, place: Place, ended: Callable[[int], None]) -> None:
        """`ended` is told of each choice whose end was seen, when it is reached."""
        super().__init__()
        self._answering = answering
        self._missing = list(place.tokens)
        self._unended = set(place.ended)
        self._ended = ended
        for index in place.ended:
            self._reach_end(index)

    def put(
        self,
        index: int,
        *,
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] = (),
        finish: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> None:
        if index in self._answering.ended:
            return
        seen = min(self._missing[index], len(tokens))
        if seen:
            self._missing[index] -= seen
            self._answering.next(Delta(index, list(tokens[:seen]), list(logprobs[:seen])))
            tokens, logprobs = tokens[seen:], logprobs[seen:]
            self._reach_end(index)
        if index in self._answering.ended:
            super().put(index)  # there may be nothing more to wait for
        elif tokens or finish is not None or error is not None:
            super().put(index, tokens=tokens, logprobs=logprobs, finish=finish, error=error)

    def put_plain(self, index: int, tokens: Sequence[int]) -> None:
        if self._missing[index]:
            self.put(index, tokens=tokens)
        else:
            super().put_plain(index, tokens)

    def _reach_end(self, index: int) -> None:
        if index in self._unended and not self._missing[index]:
            self._unended.discard(index)
            self._answering.ended.add(index)
            self._ended(index)


def unseen(
    answering: Answering, log: Mapping[int, Delta], place: Place, *, most: Sequence[int], ended: Callable[[int], None]
) -> Mailbox:
    """What of the log is behind the place; the rest is rendered to nowhere, also of what is still to be put there.
    `most`: tokens by choice that may have been seen. Raises a 400 `RequestError`, and renders nothing, where more is
    said to be."""
    if any(tokens > allowed for tokens, allowed in zip(place.tokens, most, strict=True)):
        raise _foreign()
    mailbox = BehindPlace(answering, place, ended)
    for delta in log.values():
        mailbox.put(delta.index, tokens=delta.tokens, logprobs=delta.logprobs, finish=delta.finish, error=delta.error)
    return mailbox


def number_seen(text: str) -> int:
    """Of the last event that was, -1 = none. Raises a 400 `RequestError`."""
    if not text:
        return -1
    if not _NUMBER.fullmatch(text):
        raise _foreign()
    return int(text)


def _foreign() -> RequestError:
    return RequestError(
        f"{LAST_EVENT_HEADER}: send the id of the last event that came in this stream, or leave it out for all of it.",
        param=LAST_EVENT_HEADER,
    )
