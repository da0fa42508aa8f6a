"""A resumable stream that a gateway generates, and its choices as another gateway submits them again.

Kept by `resumption.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from cohort.common.errors import RequestError
from cohort.common.machines.entry import Entry
from cohort.common.types import Attempt, InstanceId, Request
from cohort.services.gateway.generation.answering import Answering
from cohort.services.gateway.generation.delta import Delta, Generation
from cohort.services.gateway.keys.key_lease import Lease
from cohort.services.gateway.requests.parsing import Call
from cohort.services.gateway.resume.resume_forms import Form
from cohort.services.gateway.resume.resume_tape import Tape

RESUME_HEADER = "x-cohort-resume"
_TOKEN_BYTES = 6
"""Of a generated token in the database, at most; `_SCORE_BYTES` for each log-probability beside it."""
_SCORE_BYTES = 16
Outcome = Literal["done", "left", "dropped", "lost"]
"""Complete or failed for good; to be continued by the gateway that is asked next; wanted no more; another gateway's."""


@dataclass(slots=True, eq=False)
class Session:
    """A stream that is generated here. `answering`: of its reader of now."""

    token: str
    digest: str
    owner: str
    tape: Tape
    generation: Generation
    answering: Answering
    requests: list[Request]
    created_s: float
    lease: Lease | None
    form: Form
    charged_tokens: int | None = None
    """Completion tokens, and with them the prompt, that an earlier gateway charged."""
    gaps: bool = False
    """It was taken from the disk, which may have refused what its client saw at the end of an earlier gateway."""
    rendered: int = 0
    """Completion tokens of a reader before this one, who may have been further."""
    stored: bool = False
    told: bool = False
    """Its client knows the token."""
    over: bool = False
    unread: asyncio.Task[None] | None = None
    grace: asyncio.TimerHandle | None = None

    def used(self) -> tuple[int, int]:
        prompt, completion = self.answering.used()
        completion = max(completion, self.rendered)
        return (prompt, completion) if self.charged_tokens is None else (0, max(0, completion - self.charged_tokens))


def asked_to_keep(headers: Mapping[str, str], call: Call) -> bool:
    """Whether the client of this request wants to be able to resume. Raises a 400 `RequestError`."""
    asked = headers.get(RESUME_HEADER)
    if asked is None:
        return False
    if asked.strip().lower() != "keep":
        raise RequestError(f"{RESUME_HEADER}: 'keep', or no such header.", param=RESUME_HEADER)
    if not call.stream:
        raise RequestError(f"{RESUME_HEADER}: only a stream can be resumed.", param=RESUME_HEADER)
    if call.scores_prompt:
        raise RequestError(
            f"{RESUME_HEADER}: not with log-probabilities of the prompt, which are computed and sent only once.",
            param=RESUME_HEADER,
        )
    return True


def most_output_bytes(requests: Sequence[Request]) -> int:
    """Of their tokens in the database."""
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
    """The choices `left`, with their output so far. `arrival_s`: wall clock. Other ids, because attempts of the gateway
    before may still run; the tokens depend on seed and position alone. None is refused for a late first token."""
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
    """Of a choice that is complete."""
    return Entry(request, now_s, now_s, output=list(said.tokens) if said else [])


def tell(answering: Answering, error: RequestError) -> None:
    """The reader of this one ends with the error."""
    for index in range(len(answering.choices)):
        answering.generation.mailbox.put(index, error=error)


def unknown() -> RequestError:
    return RequestError("There is no such stream.", status=404)


def taken_over() -> RequestError:
    return RequestError("This stream is read by another connection now.", status=409)


def cancelled() -> RequestError:
    return RequestError("This stream was cancelled.", status=410)
