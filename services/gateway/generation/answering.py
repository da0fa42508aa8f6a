"""One HTTP request on its way back: tokens become text, text becomes what the client is sent.

    Streams ─▶ Outlet.put_tokens ─▶ Choice.plain ─▶ Writer.plain ─▶ Sink.soon                      nearly every token
                     └─▶ Outlet.put ─▶ run ─▶ Answering.next ─▶ Writer.take ─▶ Sink.send    all that need a look

Made by `generator.py` once a request is admitted. Knows no HTTP: a `Writer` has the API's format, a `Sink` the
destination. The first choice of a prompt scores an echo for all; their deltas wait for it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import msgspec

from cohort.common.errors import RequestError
from cohort.common.machines.entry import Entry
from cohort.common.messages import TokenLogprob
from cohort.common.types import FinishReason
from cohort.services.gateway.generation.answer_parts import stable_id
from cohort.services.gateway.generation.answer_reader import AnswerReader
from cohort.services.gateway.generation.choice import Choice, Piece, ScoredToken, prompt_scores
from cohort.services.gateway.generation.delta import Delta, Generation
from cohort.services.gateway.generation.openai_shapes import (
    Extras,
    Scores,
    Shape,
    Usage,
    extras_of,
    prompt_places,
    usage_of,
)
from cohort.services.gateway.generation.preparation import Reservation
from cohort.services.gateway.requests.parsing import Call
from cohort.services.gateway.text.tokenizer import TokenText

# Tokens that are written at a time: a few milliseconds of the event loop, with twenty log-probabilities each.
WRITTEN_AT_ONCE = 64


@dataclass(frozen=True, slots=True)
class Step:
    """Delta as the client sees it. `first`: the choice's first visible piece."""

    piece: Piece
    finish: FinishReason | None
    first: bool


KEEPALIVE = Step(Piece("", (), stopped=False), finish=None, first=False)
"""Empty step: the stream needs a keep-alive event."""


class Writer(Protocol):
    """Format of one answer: turns its steps into the events of an API, in order. An empty list sends nothing."""

    @property
    def at_once(self) -> bool:
        """Whether `plain` can be called now."""

    def plain(self, index: int, text: str) -> bytes:
        """Return the event of a piece that is text alone, for a choice that has begun."""

    async def take(self, index: int, step: Step) -> list[bytes]: ...

    def keepalive(self) -> list[bytes]:
        """Return the keep-alive events of a stream that has been idle for `keepalive_s`."""

    async def end(self) -> list[bytes]:
        """Return the last events, when all choices have ended."""

    def failed(self, error: RequestError) -> list[bytes]:
        """Return the events of a failure, the stream's end included."""


class Sink(Protocol):
    """Destination of an answer's events."""

    keeps_up: bool
    """Whether events sent by `soon` leave without queueing up."""

    def soon(self, event: bytes) -> None: ...

    async def send(self, events: Sequence[bytes]) -> None: ...


class Nowhere:
    """Sink without a client."""

    keeps_up = False

    def soon(self, event: bytes) -> None:
        pass

    async def send(self, events: Sequence[bytes]) -> None:
        pass


class Outlet:
    """Way of an answer's tokens to one reader. An event of plain text is written when its token is put, without a task,
    while `run` waits and nothing is before it. All else waits for `run`, merged by choice: first and last pieces,
    tokens with more to find or write, and everything while the client does not keep up, so that back-pressure and time
    limits hold. What waits is bounded by max_tokens."""

    at_once = True
    least = 1
    """Tokens of a choice for which the reader is woken; what is no token, or an end, wakes it too."""

    def __init__(self) -> None:
        self._ready: dict[int, Delta] = {}  # insertion order: the choice that waits longest first
        self._wakeup = asyncio.Event()
        self.waits = False
        """Whether all that came so far is with the client, or on its way there."""
        self._answering: Answering | None = None
        """Answer whose plain tokens may be written at once; None while they may not."""
        self._writer: Writer
        self._sink: Sink
        self._choices: dict[int, Choice] = {}
        """Choices that have begun."""
        self._defect: Exception | None = None
        """Internal error that `run` raises."""
        self._last_delta_s = 0.0
        self._time: Callable[[], float] | None = None
        """Clock, set while the time of the last delta matters."""

    def put_tokens(self, index: int, tokens: list[int]) -> None:
        if self.waits and self._written(index, tokens):
            return
        self.put(Delta(index, tokens))

    def put(self, delta: Delta) -> None:
        ready = self._ready.get(delta.index)
        if ready is None:
            ready = self._ready[delta.index] = Delta(delta.index)
        ready.merge(delta)
        if len(ready.tokens) >= self.least or not delta.tokens or ready.finish is not None or ready.error is not None:
            self.waits = False
            self._wakeup.set()

    async def run(self, answering: Answering, writer: Writer, sink: Sink, keepalive_s: float | None = None) -> None:
        """Answer until all choices have ended, with `Writer.keepalive` after every idle `keepalive_s`. Raises the
        `RequestError` with which a choice fails."""
        if self.at_once and answering.plain:
            self._answering, self._writer, self._sink = answering, writer, sink
        try:
            async for index, step in self.steps(answering, keepalive_s):
                await sink.send(writer.keepalive() if step is KEEPALIVE else await writer.take(index, step))
        finally:
            self._answering = None
        await sink.send(await writer.end())

    async def steps(self, answering: Answering, keepalive_s: float | None = None) -> AsyncIterator[tuple[int, Step]]:
        """Yield each delta with its choice's index until all have ended; `KEEPALIVE` after every idle `keepalive_s`.
        Raises the `RequestError` with which a choice fails, after the tokens that came before."""
        ended = answering.ended
        while len(ended) < len(answering.choices):
            arrived = await self._next(keepalive_s)
            if arrived is None:
                yield 0, KEEPALIVE
                continue
            for delta in answering.due(arrived):
                if delta.index in ended:
                    continue
                if delta.tokens or delta.error is None:
                    step = answering.next(delta)
                    if step.piece.stopped:
                        answering.stop(delta.index)
                    if step.finish is not None:
                        ended.add(delta.index)
                    yield delta.index, step
                if delta.error is not None and delta.index not in ended:
                    if delta.error.param == "grammar" and (spec := answering.call.grammar_spec) is not None:
                        delta.error.param = spec.param
                    raise delta.error

    def _written(self, index: int, tokens: list[int]) -> bool:
        """Write at once, with an event for each token that completes a character. Return False if nothing was done."""
        answering = self._answering
        if answering is None or not self._sink.keeps_up or not self._writer.at_once:
            return False
        choice = self._choices.get(index)
        if choice is None:
            if index not in answering.started or index in answering.ended or answering.reads(index):
                return False  # the first event says more
            choice = self._choices[index] = answering.choices[index]
        try:
            for token in tokens:
                text = choice.plain(token)
                if text:
                    self._sink.soon(self._writer.plain(index, text))
        except Exception as defect:  # the client must not take an answer with a hole for a whole one
            self._defect, self.waits = defect, False
            self._wakeup.set()
        if self._time is not None:
            self._last_delta_s = self._time()
        return True

    async def _next(self, keepalive_s: float | None) -> Delta | None:
        """Return the next delta, or None if none came within `keepalive_s`."""
        if keepalive_s is None or self._ready:
            return await self._arrived()
        self._time = asyncio.get_running_loop().time
        self._last_delta_s = idle_from_s = self._time()
        while True:
            try:
                async with asyncio.timeout_at(idle_from_s + keepalive_s):
                    return await self._arrived()
            except TimeoutError:
                if self._last_delta_s == idle_from_s:
                    return None
                idle_from_s = self._last_delta_s

    async def _arrived(self) -> Delta:
        """Wait for a delta, without a deadline: the ledger ends every request by its own."""
        while not self._ready:
            self._wakeup.clear()
            self.waits = True
            try:
                await self._wakeup.wait()
            finally:
                self.waits = False
            if self._defect is not None:
                raise self._defect
        return self._ready.pop(next(iter(self._ready)))


@dataclass(slots=True)
class Mean:
    """Mean log-probability of a choice's tokens, over those that were scored."""

    total: float = 0.0
    count: int = 0

    def add(self, scores: Sequence[ScoredToken]) -> None:
        logprobs = [scored.score.logprob for scored in scores if scored.score is not None]
        self.total += sum(logprobs)
        self.count += len(logprobs)

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else 0.0


@dataclass(slots=True)
class Answering:
    """Choices of one request, as text so far."""

    call: Call
    generation: Generation
    shape: Shape
    text: TokenText
    choices: list[Choice]
    echoes: list[str]
    base_id: str
    id: str
    created: int
    model: str
    reserved: Reservation
    created_s: float
    stop: Callable[[int], None]
    """Callback for a choice that a stop string ended."""
    outlet: Outlet = field(default_factory=Outlet)
    token_by_token: bool = False
    """Whether each token is a step of its own, however many come at once: steps are then the same on every gateway, and
    an answer that ends with its first tool call has no token after it."""
    readers: list[AnswerReader] = field(default_factory=list)
    """Readers of reasoning and tool calls, one per choice; empty where answers have neither."""
    reasoning_tokens: dict[int, int] = field(default_factory=dict)
    """Tokens of reasoning by choice, its marks included."""
    started: set[int] = field(default_factory=set)
    ended: set[int] = field(default_factory=set)
    """Choices of a stream that are complete."""
    _unsent: dict[int, list[ScoredToken]] = field(default_factory=dict)
    """Log-probabilities of text that is held back as it may be a call."""
    _echo_scores: dict[int, Scores] = field(default_factory=dict)
    """Scores of echoed prompts, by the first choice of the prompt."""
    _prompt_logprobs: dict[int, msgspec.Raw] = field(default_factory=dict)
    """Scored prompts as vLLM writes them, by the first choice of the prompt."""
    _held: dict[int, dict[int, Delta]] = field(default_factory=dict)
    """Deltas of a prompt's other choices that came before its scores, by the first choice of the prompt."""

    @property
    def plain(self) -> bool:
        """Whether an answer's content is its text alone, without scores, usage or stop strings."""
        call = self.call
        scored = call.shows_logprobs or call.scores_prompt or call.sampling.logprobs >= 0
        return not (scored or call.continuous_usage or call.stop_strings)

    def whole(self) -> AsyncIterator[tuple[int, Step]]:
        """Yield the steps of an answer that is sent as one: those of plain text are of many tokens."""
        if self.plain and not self.readers:
            self.outlet.least = WRITTEN_AT_ONCE
        return self.outlet.steps(self)

    def reads(self, index: int) -> bool:
        """Return whether a choice's next text may be more than content."""
        return bool(self.readers) and not self.readers[index].is_plain

    def due(self, delta: Delta) -> list[Delta]:
        """Return the deltas to answer now: none until the prompt is scored, then those that waited too."""
        ready = self._ready(delta)
        return [part for each in ready for part in each.by_token()] if self.token_by_token else ready

    def _ready(self, delta: Delta) -> list[Delta]:
        first = delta.index - delta.index % self.call.n
        scored = self.generation.entries[first].first_token_s is not None  # with the first token of its first choice
        if scored or not self.call.scores_prompt:
            return [delta, *self._held.pop(first, {}).values()]
        if delta.error is not None:
            return [Delta(delta.index, error=delta.error)]
        held = self._held.setdefault(first, {})
        if delta.index in held:
            held[delta.index].merge(delta)
        else:
            held[delta.index] = delta
        return []

    def next(self, delta: Delta) -> Step:
        """Return the delta as text. A stop string ends the choice; an echoed prompt comes with the first text."""
        index, tokens, finish = delta.index, delta.tokens, delta.finish
        if self.call.max_tokens == 0 and finish is not None:
            tokens, finish = [], FinishReason.LENGTH  # a scored prompt yields a token that was not requested
        if self.readers:
            piece = self._read(index, tokens, delta.logprobs, finish)
        else:
            piece = self.choices[index].feed(tokens, delta.logprobs, finish)
        self.generation.entries[index].logprobs.clear()  # they are written below; nothing looks at them again
        finish = FinishReason.STOP if piece.stopped else finish
        first = index not in self.started and bool(piece.text or piece.parts or finish)
        if first:
            self.started.add(index)
        if echo := self.echoes[index]:
            text = echo + piece.text if first else piece.text
            piece = dataclasses.replace(piece, text=text, scores=_behind(echo, piece.scores))
        return Step(piece, finish, first)

    def _read(
        self, index: int, tokens: Sequence[int], scores: Sequence[TokenLogprob], finish: FinishReason | None
    ) -> Piece:
        """Return the tokens as parts of an answer, read one by one: each may be the last, or one of reasoning."""
        choice, reader = self.choices[index], self.readers[index]
        unsent, stopped = self._unsent.setdefault(index, []), False
        for place, token in enumerate(tokens):
            is_reasoning = reader.in_reasoning
            piece = choice.feed([token], scores[place : place + 1], None)
            reader.write(piece.text)
            unsent += piece.scores
            if is_reasoning or reader.in_reasoning:
                self.reasoning_tokens[index] = self.reasoning_tokens.get(index, 0) + 1
            if piece.stopped or (reader.ended and (finish is None or place < len(tokens) - 1)):
                stopped = True
                break
        if finish is not None and not stopped:
            piece = choice.feed([], (), finish)
            reader.write(piece.text)
            unsent += piece.scores
        parts = reader.finish() if finish is not None or stopped else reader.found()
        due = self._unsent.pop(index) if parts or finish or stopped else []
        content = "".join([part for part in parts if isinstance(part, str)])
        return Piece(content, due, stopped, parts, called=reader.calls > 0)

    def unique_id(self) -> str:
        """Return this answer's id, 32 hexadecimal digits: the same for every rendering, on another gateway too."""
        return stable_id(self.base_id, repr(self.created_s))

    @property
    def completion_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    def usage(self) -> Usage:
        """Return the usage of all choices. A prompt counts once, however many choices it has."""
        entries = self.generation.entries[:: self.call.n]
        return usage_of(
            sum(entry.request.prompt_tokens for entry in entries),
            self.completion_tokens,
            sum(entry.cached_tokens for entry in entries),
            sum(self.reasoning_tokens.values()) if self.readers else None,
        )

    def used(self) -> tuple[int, int]:
        """Return prompt and completion tokens used. A prompt counts as soon as a worker has it."""
        entries, n = self.generation.entries, self.call.n
        placed = (entries[first] for first in range(0, len(entries), n) if _placed(entries[first : first + n]))
        return sum(entry.request.prompt_tokens for entry in placed), self.completion_tokens

    def choice_usage(self, index: int) -> Usage:
        entry = self.generation.entries[index]
        reasoning = self.reasoning_tokens.get(index, 0) if self.readers else None
        return usage_of(entry.request.prompt_tokens, self.choices[index].tokens, entry.cached_tokens, reasoning)

    def extras(self, indexes: Iterable[int], *, renumbered: bool = False) -> Extras:
        """Return the extras of these choices; `renumbered` counts them from 0 in this order."""
        extras = []
        for place, index in enumerate(indexes):
            entry, choice = self.generation.entries[index], self.choices[index]
            tokens = entry.output[: choice.tokens] if self.call.return_token_ids else None
            extras.append(
                extras_of(place if renumbered else index, entry, self.generation.times, choice.stop_string, tokens)
            )
        return Extras(extras)

    async def scores(self, index: int, *, first: bool) -> Scores | None:
        """Return an empty list of a choice's scores, with an echoed prompt's before it; None if none are wanted."""
        if not self.call.shows_logprobs:
            return None
        return self.shape.scores(await self._of_echo(index) if first and self.call.scores_echo else None)

    async def write(self, scores: Scores, tokens: Sequence[ScoredToken]) -> None:
        """Append scores, yielding to the event loop in between."""
        for start in range(0, len(tokens), WRITTEN_AT_ONCE):
            if start:
                await asyncio.sleep(0)
            scores.add(tokens[start : start + WRITTEN_AT_ONCE])

    def likeliest(self, means: Sequence[float]) -> list[int]:
        """Return the choices to send: all, or those of each prompt with the largest mean log-probability."""
        n, count, chosen = self.call.n, self.call.returned_choices, list[int]()
        for first in range(0, len(means), n):
            group = range(first, first + n)
            chosen += group if count == n else sorted(group, key=lambda index: -means[index])[:count]
        return chosen

    async def prompt_logprobs(self, index: int) -> msgspec.Raw | None:
        """Return the prompt's log-probabilities as vLLM writes them; None if the client wants none."""
        if self.call.prompt_logprobs < 0:
            return None
        first = index - index % self.call.n
        written = self._prompt_logprobs.get(first)
        if written is None:
            entry = self.generation.entries[first]
            tokens, parts = entry.request.tokens[1 : entry.request.prompt_tokens], [b"null"]
            for start in range(0, len(tokens), WRITTEN_AT_ONCE):
                end = start + WRITTEN_AT_ONCE
                parts += prompt_places(self.text, tokens[start:end], entry.prompt_logprobs[start:end])
                await asyncio.sleep(0)
            written = self._prompt_logprobs[first] = msgspec.Raw(b"[" + b",".join(parts) + b"]")
            entry.prompt_logprobs.clear()
        return written

    async def _of_echo(self, index: int) -> Scores:
        first = index - index % self.call.n
        scores = self._echo_scores.get(first)
        if scores is None:
            entry = self.generation.entries[first]
            detokenizer = self.text.stream(context=(), skip_special=self.call.skip_special_tokens)
            scores = self._echo_scores[first] = self.shape.scores()
            found = prompt_scores(detokenizer, entry.request.tokens, entry.prompt_logprobs)
            while part := list(islice(found, WRITTEN_AT_ONCE)):
                scores.add(part)
                await asyncio.sleep(0)
            entry.prompt_logprobs.clear()
        return scores


def _behind(echo: str, scores: Sequence[ScoredToken]) -> list[ScoredToken]:
    return [dataclasses.replace(item, offset=item.offset + len(echo)) for item in scores]


def _placed(choices: Iterable[Entry]) -> bool:
    return any(entry.instances or entry.first_token_s is not None for entry in choices)
