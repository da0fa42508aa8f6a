"""A resumable stream that a gateway generates: what it was given so far, and how another gateway submits it again.

    Streams ─▶ put ─▶ unwritten ─▶ journal ─▶ written ─▶ log ─▶ the reader of now

A tape takes tokens as an outlet does: `resume_journal.py` writes them before a reader sees them, and a later connection
reads from its client's place. `preparation.py` bounds its size. Kept by `resumption.py`.
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
from cohort.services.gateway.generation.delta import Delta, Taker
from cohort.services.gateway.generation.generator import ApiRequest, Endpoint
from cohort.services.gateway.http.service_headers import RESUME_HEADER
from cohort.services.gateway.keys.key_lease import Lease
from cohort.services.gateway.requests.parsing import Call

_TOKEN_BYTES = 6
"""Size of a generated token in the database, at most; `_SCORE_BYTES` is that of a log-probability."""
_SCORE_BYTES = 16
Outcome = Literal["done", "left", "dropped", "lost"]
"""End of a session: complete or failed; left to the next gateway; unwanted; taken by another gateway."""


class ResumeLog:
    def __init__(self, *, indexes: Sequence[int] = (), log: dict[int, Delta] | None = None) -> None:
        """`indexes`: choices by their place here; () = all. `log`: an earlier gateway's deltas by choice."""
        self.log: dict[int, Delta] = log or {}
        self.error: RequestError | None = None
        """Error of the stream, which the reader raises at its end."""
        self.reader: Taker = Outlet()
        """Destination of the deltas. Another reader, which has what it needs of the log, may take its place."""
        self._indexes = indexes
        self._unwritten: dict[int, Delta] = {}
        self._changed: Callable[[], None] | None = None

    def put(self, delta: Delta) -> None:
        self._of(delta.index).merge(delta)
        if self._changed is not None:
            self._changed()

    def put_tokens(self, index: int, tokens: list[int]) -> None:
        """Take tokens without sending any before they are written."""
        self._of(index).tokens += tokens
        if self._changed is not None:
            self._changed()

    def _of(self, index: int) -> Delta:
        choice = self._indexes[index] if self._indexes else index
        unwritten = self._unwritten.get(choice)
        if unwritten is None:
            unwritten = self._unwritten[choice] = Delta(choice)
        return unwritten

    def begin(self, changed: Callable[[], None]) -> None:
        """Set `changed`, called whenever there is something to write."""
        self._changed = changed
        if self._unwritten:
            changed()

    def take_unwritten(self) -> list[Delta]:
        deltas, self._unwritten = list(self._unwritten.values()), {}
        return deltas

    def written(self, deltas: Sequence[Delta]) -> None:
        """Pass on deltas that are written and so may be seen."""
        for delta in deltas:
            known = self.log.get(delta.index)
            if known is None:
                known = self.log[delta.index] = Delta(delta.index)
            known.merge(delta)
            self.error = delta.error or self.error
            if delta.logprobs or delta.finish or delta.error:
                self.reader.put(delta)
            else:
                self.reader.put_tokens(delta.index, delta.tokens)


@dataclass(slots=True, eq=False)
class Session:
    """A stream that is generated here. `answering`: of its reader of now."""

    token: str
    digest: str
    owner: str
    resume_log: ResumeLog
    answering: Answering
    requests: list[Request]
    lease: Lease | None
    endpoint: Endpoint
    asked: ApiRequest
    charged_tokens: int | None = None
    """Completion tokens, and with them the prompt, that an earlier gateway charged."""
    gaps: bool = False
    """Whether the session came from the disk, which may lack what its client saw last of an earlier gateway."""
    rendered: int = 0
    """Completion tokens of a reader before this one, who may have been further."""
    stored: bool = False
    token_announced: bool = False
    """Whether the client knows the token."""
    over: bool = False
    unread: asyncio.Task[None] | None = None
    grace: asyncio.TimerHandle | None = None

    def used(self) -> tuple[int, int]:
        prompt, completion = self.answering.used()
        completion = max(completion, self.rendered)
        return (prompt, completion) if self.charged_tokens is None else (0, max(0, completion - self.charged_tokens))


def refuse_unkeepable(asked: str, call: Call) -> None:
    """Refuse a request that cannot be resumed; `asked` is the client's header. Raises a 400 `RequestError`."""
    if asked.strip().lower() != "keep":
        raise RequestError(f"{RESUME_HEADER}: 'keep', or no such header.", param=RESUME_HEADER)
    if not call.stream:
        raise RequestError(f"{RESUME_HEADER}: only a stream can be resumed.", param=RESUME_HEADER)
    if call.scores_prompt:
        raise RequestError(
            f"{RESUME_HEADER}: not with log-probabilities of the prompt, which are computed and sent only once.",
            param=RESUME_HEADER,
        )


def most_output_bytes(requests: Sequence[Request]) -> int:
    """Return the most bytes that the answers' tokens take in the database."""
    each = [request.sampling for request in requests]
    return sum(it.max_tokens * (_TOKEN_BYTES + _SCORE_BYTES * (it.logprobs + 1)) for it in each)


def resubmitted(
    requests: Sequence[Request],
    said: Mapping[int, Delta],
    left: Sequence[int],
    *,
    name: str,
    gateway: InstanceId,
    arrival_s: float,
) -> list[Request]:
    """Build requests that continue the choices `left` from their output. `arrival_s`: wall clock. Ids are new, as old
    attempts may still run; tokens depend on seed and position alone. A late first token is not refused."""
    return [
        msgspec.structs.replace(
            requests[index],
            attempt=Attempt(f"{name}-{index}", 0),
            gateway=gateway,
            tokens=[*requests[index].tokens, *(said[index].tokens if index in said else ())],
            arrival_s=arrival_s,
            if_late="serve",
        )
        for index in left
    ]


def ended_entry(now_s: float, request: Request, said: Delta | None) -> Entry:
    return Entry(request, now_s, now_s, output=list(said.tokens) if said else [])


def fail_reader(answering: Answering, error: RequestError) -> None:
    """End an answer's reader with the error."""
    for index in range(len(answering.choices)):
        answering.outlet.put(Delta(index, error=error))


def unknown() -> RequestError:
    return RequestError("There is no such stream.", status=404)


def taken_over() -> RequestError:
    return RequestError("This stream is read by another connection now.", status=409)


def cancelled() -> RequestError:
    return RequestError("This stream was cancelled.", status=410)
