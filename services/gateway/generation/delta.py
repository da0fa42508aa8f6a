"""Data shared by the host of the gateway's machine and the handler of a request: deltas of tokens, and times.

The parts of a request's time to first token and whether its SLO was met go to metrics (`request_stats.py`) and to the
answer's own extras (`openai_shapes.py`). All times are seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, Protocol

from cohort.common.errors import RequestError
from cohort.common.machines.entry import Entry
from cohort.common.messages import TokenLogprob
from cohort.common.process.metrics import TtftStage
from cohort.common.types import FinishReason, RequestId, Slo
from cohort.services.gateway.generation.request_trace import RequestTrace
from cohort.services.gateway.keys.key_lease import Lease, OnSloResult

StreamKind = Literal["chunks", "responses", "messages"]
"""Format of a stream: completions and chats as chunks, the others by the name of their API."""


@dataclass(slots=True)
class Delta:
    """Tokens of one choice, and perhaps its end, since its handler last read."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    error: RequestError | None = None

    def merge(self, later: Delta) -> None:
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.finish = later.finish or self.finish
        self.error = later.error or self.error

    def by_token(self) -> Iterator[Delta]:
        for place, token in enumerate(self.tokens):
            yield Delta(self.index, [token], self.logprobs[place : place + 1])
        if self.finish is not None or self.error is not None:
            yield Delta(self.index, finish=self.finish, error=self.error)


class TokenSink(Protocol):
    """Destination of a request's tokens: an outlet, or a resumable stream's log."""

    def put(self, delta: Delta) -> None: ...

    def put_tokens(self, index: int, tokens: list[int]) -> None:
        """Take tokens that come without scores, end or error."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Client of a request. `owner`: as `Key.owner`; `client_id`: its own id, with which ours begins; "" = none."""

    owner: str
    client_id: str
    arrived_s: float
    priority_penalty: int = 0
    """Amount added to the requested priority; lower is served first."""
    lease: Lease | None = None
    """Token budget of its API key; None without one."""
    trace: RequestTrace | None = None


@dataclass(slots=True)
class GatewayTimes:
    """The gateway's own timestamps of a request (monotonic) and durations."""

    arrived_s: float
    tokenize_s: float = 0.0
    trace: RequestTrace | None = None
    on_slo_result: OnSloResult | None = None
    """Callback for each ended choice with SLOs; None without an API key."""


@dataclass(slots=True)
class Generation:
    """Choices of one HTTP request; no entries until it is admitted."""

    times: GatewayTimes
    entries: list[Entry] = field(default_factory=list)

    @property
    def request_ids(self) -> list[RequestId]:
        return [entry.request_id for entry in self.entries]


def ttft_stages(times: GatewayTimes, entry: Entry) -> dict[TtftStage, float]:
    """Return the parts that add up to the time to first token; empty before there is one.

    `first_decode` is what no other part explains: the first token's way through sampling, the wire and this process.
    """
    if entry.first_token_s is None or entry.first_times is None:
        return {}
    worker = entry.first_times
    stages: dict[TtftStage, float] = {
        "tokenize": times.tokenize_s,
        "predict": entry.predict_s,
        "bucket": entry.bucket_s,
        "prefill_queue": worker.queue_s,
        "prefill": worker.prefill_s,
        "transfer": worker.transfer_s,
    }
    explained_s = sum(stages.values())
    stages["first_decode"] = max(0.0, entry.first_token_s - times.arrived_s - explained_s)
    return stages


def tpot_s(entry: Entry) -> float | None:
    """Return the mean time per output token after the first; None for fewer than two tokens."""
    if entry.first_token_s is None or entry.last_token_s is None or len(entry.output) < 2:
        return None
    return (entry.last_token_s - entry.first_token_s) / (len(entry.output) - 1)


def slo_outcomes(slo: Slo, *, ttft_s: float | None, per_token_s: float | None, e2e_s: float | None) -> dict[str, bool]:
    """Return whether each promised objective was met. A time that never came (None) misses it, except TPOT in an answer
    of one token."""
    outcomes: dict[str, bool] = {}
    if slo.ttft_s:
        outcomes["ttft"] = ttft_s is not None and ttft_s <= slo.ttft_s
    if slo.tpot_s and (per_token_s is not None or ttft_s is None):
        outcomes["tpot"] = per_token_s is not None and per_token_s <= slo.tpot_s
    if slo.deadline_s:
        outcomes["deadline"] = e2e_s is not None and e2e_s <= slo.deadline_s
    return outcomes
