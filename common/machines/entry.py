"""Owned request, as its gateway knows it. Only `ledger.py` and `peers.py` change it; hosts read it for answers, metrics
and log lines.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from cohort.common.messages import LengthFacts, PooledStates, StageTimes, TokenLogprob
from cohort.common.tokens import joined
from cohort.common.types import Attempt, InstanceId, Prediction, Request, RequestId
from cohort.common.views import MOST_MOMENTS


class State(enum.Enum):
    OPEN = "open"  # not (or not again) handed to the manager yet
    WAITING = "waiting"  # the manager has it, no worker known
    PLACED = "placed"  # on workers, no token of this attempt yet
    RUNNING = "running"


class LifecycleMoment(NamedTuple):
    """Moment in a request's life, for people. `at_s`: the gateway's clock."""

    at_s: float
    what: str
    where: str = ""
    why: str = ""


@dataclass(slots=True, repr=False)
class Entry:
    """Request that a gateway owns. `output`, `logprobs`: all tokens delivered, over all attempts. Monotonic times."""

    request: Request
    opened_s: float
    expires_s: float
    owner: str = ""
    """Owner whose share the request counts against while it waits; "" if nothing is shared out."""
    attempt: Attempt = field(init=False)
    state: State = State.OPEN
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of the prompt from its second token on, if requested; complete with the first output token."""
    pooled: PooledStates | None = None
    """Prompt's final states, for an embedding; complete with the first output token."""
    facts: LengthFacts | None = None
    """Facts for the length predictor; one object for all choices of a prompt."""
    prediction_id: RequestId = ""
    """Choice of the same prompt under which its length was requested; empty if it was not."""
    prediction: Prediction | None = None
    predict_s: float = 0.0
    """Time that the request waited for its prediction."""
    cached_tokens: int = 0
    instances: list[InstanceId] = field(default_factory=list)
    """Workers this request was placed on, in order of first appearance."""
    holders: set[InstanceId] = field(default_factory=set)
    """Workers that may hold something of the current attempt."""
    last_progress_s: float = 0.0
    first_token_s: float | None = None
    last_token_s: float | None = None
    bucket_s: float = 0.0
    """Time in the manager before the placement that led to the first token."""
    times: dict[InstanceId, StageTimes] = field(default_factory=dict)
    first_times: StageTimes | None = None
    """Summed stage times up to the first token."""
    placement_reason: str = ""
    lost_because: str = ""
    """Reason for the end of the attempt before this one."""
    lost_kind: str = ""
    """Kind of that loss: lost, gap, stall, cancelled, contradiction or manager."""
    unplaced: int = 0
    """Attempts that waited at a manager which was replaced. They do not count against the maximum."""
    queued_tokens: float = 0.0
    """Prompt and expected output tokens while the request counts as waiting; 0 afterwards."""
    sibling_ids: tuple[RequestId, ...] = ()
    """All choices of its HTTP request, itself included, if there are several: they are refused together."""
    refused_because: str = ""
    """Reason of the manager's refusal, in one word."""
    best_effort: bool = False
    """Whether the manager demoted the request: it is served as best-effort, whatever was requested."""
    forecast_s: float = 0.0
    """Predicted TTFT for which the request was refused or demoted."""
    moments: list[LifecycleMoment] = field(default_factory=list, compare=False)
    """Submissions, placements, starts and losses of the request, for people only. At most `MOST_MOMENTS`."""
    prompt_tokens: int = field(init=False)
    most_tokens: int = field(init=False)
    stop_ids: tuple[int, ...] = field(init=False)
    with_logprobs: bool = field(init=False)
    """Facts of `request` that are needed for every token, copied for speed: `prompt_tokens` to `with_logprobs`."""

    def __post_init__(self) -> None:
        self.attempt = self.request.attempt
        sampling = self.request.sampling
        self.prompt_tokens, self.most_tokens = self.request.prompt_tokens, sampling.max_tokens
        self.stop_ids, self.with_logprobs = sampling.stop_token_ids, sampling.logprobs >= 0

    def __repr__(self) -> str:
        return f"Entry({self.attempt} {self.state.value}, {len(self.output)} tokens)"

    @property
    def request_id(self) -> RequestId:
        return self.attempt.request_id

    def add_moment(self, at_s: float, what: str, where: str = "", why: str = "") -> None:
        if len(self.moments) < MOST_MOMENTS:
            self.moments.append(LifecycleMoment(at_s, what, where, why))

    @property
    def known(self) -> int:
        """Positions whose tokens are known: prompt and output."""
        return self.request.prompt_tokens + len(self.output)

    def current(self, now_s: float) -> Request:
        """Return the request as it must be submitted now. A later attempt keeps its place in the queue: it carries the
        time that the request has waited. A request accepted as best-effort stays so."""
        return msgspec.structs.replace(
            self.request.as_best_effort() if self.best_effort else self.request,
            attempt=self.attempt,
            tokens=joined(self.request.tokens, self.output),
            prediction=self.prediction,
            waited_s=now_s - self.opened_s if self.attempt.number else 0.0,
        )
