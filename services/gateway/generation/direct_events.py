"""The shortest way of a plain token to its client: from the message that brought it to the socket, without a task.

    Streams ─▶ mailbox ─▶ handler's task ─▶ steps ─▶ event ─▶ response      every token that needs a look
                  └─▶ DirectEvents.send ─▶ outbox ─▶ transport              nearly all of them

An event of one token differs from the one before by its text alone, and by its place where the stream can be resumed
(`resume_tape.py` hands on such tokens once they are written). So the rest of it is encoded once per choice, by the same
shape that writes all others. Made by `openai_api.py` for a stream that qualifies; its mailbox calls `send`
only while the handler waits and nothing is before these tokens. What is refused here takes the usual way, as do first
and last events, and everything while the client does not keep up: back-pressure and time limits live there.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import msgspec

from cohort.services.gateway.generation.answering import Answering
from cohort.services.gateway.generation.choice import Choice, Piece
from cohort.services.gateway.generation.openai_shapes import Answer
from cohort.services.gateway.http.sse import EventStream, Outbox

_encode = msgspec.json.Encoder().encode


class DirectEvents:
    __slots__ = ("_answering", "_choices", "_ended", "_events", "_outbox")

    def __init__(self, answering: Answering, events: EventStream, outbox: Outbox) -> None:
        """For an answering that qualifies (`direct_events`)."""
        self._answering = answering
        self._events = events
        self._outbox = outbox
        self._ended = answering.ended
        self._choices: dict[int, tuple[Choice, bytes, bytes]] = {}
        """With what stands around the text of an event."""

    def send(self, index: int, tokens: Sequence[int]) -> bool:
        """The next tokens of this choice, an event for each that completes a character. False: nothing was done."""
        events, known = self._events, self._choices.get(index)
        if not events.keeps_up or index in self._ended:
            return False
        if known is None:
            if index not in self._answering.begun:
                return False  # the first event says more
            known = self._choices[index] = self._answering.choices[index], *self._template(index)
        choice, before, after = known
        for token in tokens:
            text = choice.plain(token)
            if text:
                events.soon(events.mark(index) + before + _encode(text) + after, self._outbox)
        return True

    def _template(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and behind the text of an event, quotes left out."""
        answering = self._answering
        mark = uuid.uuid4().hex
        piece = Piece(mark, (), stopped=False)
        before, after = EventStream.framed(
            Answer(
                id=answering.id,
                object=answering.shape.chunk_object,
                created=answering.created,
                model=answering.model,
                choices=[answering.shape.chunk(index, piece, None, first=False, finish=None)],
            )
        ).split(_encode(mark))
        return before, after


def direct_events(answering: Answering, events: object, outbox: Outbox) -> DirectEvents | None:
    """None where more than its text may have to be said or looked for with a token."""
    call = answering.call
    looks = call.shows_logprobs or call.scores_prompt or call.continuous_usage or call.sampling.logprobs >= 0
    if looks or answering.readers or call.stop_strings or not isinstance(events, EventStream):
        return None
    return DirectEvents(answering, events, outbox)
