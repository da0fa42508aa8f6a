"""A resumable stream on the gateway that generates it: its output so far, and how another gateway resubmits it.

    Streams ─▶ put ─▶ unwritten ─▶ journal ─▶ publish ─▶ deltas ─▶ the current reader

A `ResumeLog` takes tokens as an outlet does: `resume_journal.py` writes them before a reader (a client's connection)
sees them, and a later reader begins at its client's place. `preparation.py` bounds its size. Used by `resumption.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from cohort.common.errors import RequestError
from cohort.common.machines.entry import Entry
from cohort.common.types import Attempt, InstanceId, Request
from cohort.services.gateway.generation.answering import Answering, Outlet
from cohort.services.gateway.generation.delta import Delta, TokenSink
from cohort.services.gateway.generation.generator import ApiRequest, Endpoint
from cohort.services.gateway.http.service_headers import RESUME_HEADER
from cohort.services.gateway.keys.key_lease import Lease
from cohort.services.gateway.requests.parsing import Call

_TOKEN_BYTES = 6
"""Size of a generated token in the database, at most; `_SCORE_BYTES` is that of a log-probability."""
_SCORE_BYTES = 16
Outcome = Literal["finished", "released", "discarded", "taken_over"]
"""End of a session: complete or failed; released to the next gateway; expired or cancelled; another gateway has it."""


class ResumeLog:
    def __init__(self, *, indexes: Sequence[int] = (), deltas: dict[int, Delta] | None = None) -> None:
        """`indexes`: choices by their index in `put`; () = all. `deltas`: an earlier gateway's, by choice."""
        self.deltas: dict[int, Delta] = deltas or {}
        self.error: RequestError | None = None
        """Error of the stream, which the reader raises at its end."""
        self.reader: TokenSink = Outlet()
        """Destination of new deltas. A later reader, which got its part of `deltas`, takes its place."""
        self._indexes = indexes
        self._unwritten: dict[int, Delta] = {}
        self._on_unwritten: Callable[[], None] | None = None

    def put(self, delta: Delta) -> None:
        self._unwritten_of(delta.index).merge(delta)
        if self._on_unwritten is not None:
            self._on_unwritten()

    def put_tokens(self, index: int, tokens: list[int]) -> None:
        """Take tokens without sending any before they are written."""
        self._unwritten_of(index).tokens += tokens
        if self._on_unwritten is not None:
            self._on_unwritten()

    def _unwritten_of(self, index: int) -> Delta:
        choice = self._indexes[index] if self._indexes else index
        unwritten = self._unwritten.get(choice)
        if unwritten is None:
            unwritten = self._unwritten[choice] = Delta(choice)
        return unwritten

    def call_when_unwritten(self, on_unwritten: Callable[[], None]) -> None:
        """Set the callback for deltas to write, and call it if there are some."""
        self._on_unwritten = on_unwritten
        if self._unwritten:
            on_unwritten()

    def take_unwritten(self) -> list[Delta]:
        deltas, self._unwritten = list(self._unwritten.values()), {}
        return deltas

    def publish(self, deltas: Sequence[Delta]) -> None:
        """Pass on deltas that the reader may see: they are written, or never will be."""
        for delta in deltas:
            earlier = self.deltas.get(delta.index)
            if earlier is None:
                earlier = self.deltas[delta.index] = Delta(delta.index)
            earlier.merge(delta)
            self.error = delta.error or self.error
            if delta.logprobs or delta.finish or delta.error:
                self.reader.put(delta)
            else:
                self.reader.put_tokens(delta.index, delta.tokens)


@dataclass(slots=True, eq=False)
class Session:
    """A stream that this gateway generates. `answering`: its current reader's."""

    token: str
    digest: str
    owner: str
    resume_log: ResumeLog
    answering: Answering
    requests: list[Request]
    lease: Lease | None
    endpoint: Endpoint
    api_request: ApiRequest
    charged_tokens: int = 0
    """Tokens that earlier gateways charged, the prompt's first."""
    client_may_be_ahead: bool = False
    """Whether the client may have seen more than an earlier gateway could write to the database."""
    rendered_tokens: int = 0
    """Completion tokens that earlier readers rendered, at most; a new reader starts again from 0."""
    journaled: bool = False
    """Whether the database has the stream, so that another gateway can resume it."""
    token_announced: bool = False
    """Whether the client knows the token."""
    background: bool = False
    """Whether it goes on until its end without a client, however long; its token is its answer's id."""
    over: bool = False
    drain_task: asyncio.Task[None] | None = None
    expiry: asyncio.TimerHandle | None = None

    def used(self) -> tuple[int, int]:
        prompt, completion = self.answering.used()
        completion = max(completion, self.rendered_tokens)
        of_prompt = min(prompt, self.charged_tokens)
        return prompt - of_prompt, max(0, completion - (self.charged_tokens - of_prompt))


def check_resumable(header: str, call: Call) -> None:
    """Refuse a request that cannot be resumed; `header` is the client's. Raises a 400 `RequestError`."""
    if header.strip().lower() != "keep":
        raise RequestError(f"{RESUME_HEADER}: 'keep', or no such header.", param=RESUME_HEADER)
    if not call.stream:
        raise RequestError(f"{RESUME_HEADER}: only a stream can be resumed.", param=RESUME_HEADER)
    if call.scores_prompt:
        raise RequestError(
            f"{RESUME_HEADER}: not with log-probabilities of the prompt, which are computed and sent only once.",
            param=RESUME_HEADER,
        )


def max_output_bytes(requests: Sequence[Request]) -> int:
    """Return the most bytes that the answers' tokens take in the database."""
    each = [request.sampling for request in requests]
    return sum(it.max_tokens * (_TOKEN_BYTES + _SCORE_BYTES * (it.logprobs + 1)) for it in each)


def resubmissions(
    requests: Sequence[Request],
    deltas: Mapping[int, Delta],
    unfinished: Sequence[int],
    *,
    name: str,
    gateway: InstanceId,
    arrival_s: float,
) -> list[Request]:
    """Build requests that continue the unfinished choices from their output. `arrival_s`: wall clock. Ids are new, as
    old attempts may still run; tokens depend on seed and position alone. A late first token is not refused."""
    return [
        msgspec.structs.replace(
            requests[index],
            attempt=Attempt(f"{name}-{index}", 0),
            gateway=gateway,
            tokens=[*requests[index].tokens, *(deltas[index].tokens if index in deltas else ())],
            arrival_s=arrival_s,
            if_late="serve",
        )
        for index in unfinished
    ]


def ended_entry(now_s: float, request: Request, delta: Delta | None) -> Entry:
    return Entry(request, now_s, now_s, output=list(delta.tokens) if delta else [])


def fail_reader(answering: Answering, error: RequestError) -> None:
    """End an answer's reader with the error."""
    for index in range(len(answering.choices)):
        answering.outlet.put(Delta(index, error=error))


def unknown_error() -> RequestError:
    return RequestError("There is no such stream.", status=404)


def taken_over_error() -> RequestError:
    return RequestError("This stream is read by another connection now.", status=409)


def cancelled_error() -> RequestError:
    return RequestError("This stream was cancelled.", status=410)
