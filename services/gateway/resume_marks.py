"""The place of a client in a resumable stream: the `id:` of its events, and what `Last-Event-ID` means.

    17          17 tokens of the only choice are in the events so far
    17,12e      of two choices; the second one has ended
    17e,u       the event with the usage too

Tokens rather than events are counted: how many tokens share an event depends on the moment, while what the first 17
tokens of a choice came to does not. Another gateway renders them again, unseen, and goes on behind them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog
from aiohttp import web

from cohort.common.errors import RequestError
from cohort.services.gateway.answering import Answering
from cohort.services.gateway.mailbox import Delta
from cohort.services.gateway.openai_shapes import Answer
from cohort.services.gateway.sse import EventStream

LAST_EVENT_HEADER = "Last-Event-ID"
_PLACE = re.compile(r"(\d{1,9})(e?)", re.ASCII)


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
        await self._write(b"id: %b\n" % str(place).encode() + self.framed(event))


class Unread:
    """Takes events for which there is no client."""

    async def send(self, event: msgspec.Struct | dict[str, Any]) -> None:
        pass

    async def done(self) -> None:
        pass


def forward(answering: Answering, log: Mapping[int, Delta], place: Place) -> list[Delta]:
    """Renders what was seen, to nowhere; returns what was not. Raises a 400 `RequestError`, and renders nothing, where
    more is said to be seen than there is."""
    for index, tokens in enumerate(place.tokens):
        if tokens > len(log[index].tokens if index in log else ()):
            raise _foreign()
    rest = []
    for index, tokens in enumerate(place.tokens):
        delta = log.get(index) or Delta(index)
        if index in place.ended:
            answering.next(delta)
            answering.ended.add(index)
            continue
        if tokens:
            answering.next(Delta(index, delta.tokens[:tokens], delta.logprobs[:tokens]))
        left = Delta(index, delta.tokens[tokens:], delta.logprobs[tokens:], delta.finish, delta.error)
        if left.tokens or left.finish or left.error:
            rest.append(left)
    return rest


def _foreign() -> RequestError:
    return RequestError(
        f"{LAST_EVENT_HEADER}: send the id of the last event that came in this stream, or leave it out for all of it.",
        param=LAST_EVENT_HEADER,
    )
