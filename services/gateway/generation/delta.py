"""What the host of the gateway's machine and the handler of a request have in common: tokens on their way, and times.

A `Mailbox` is filled by `streams.py` and emptied by `generator.py`; its content is bounded by the request's own
max_tokens. The parts of a request's time to first token and whether its SLO was kept go to metrics
(`request_stats.py`) and to the answer's own extras (`openai_shapes.py`). All times are seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cohort.common.errors import RequestError
from cohort.common.machines.entry import Entry
from cohort.common.messages import TokenLogprob
from cohort.common.process.metrics import TtftStage
from cohort.common.types import FinishReason, RequestId, Slo
from cohort.services.gateway.generation.request_trace import RequestTrace
from cohort.services.gateway.keys.key_lease import Judged, Lease


@dataclass(slots=True)
class Delta:
    """Tokens, and perhaps the end, of one choice since its handler last looked."""

    index: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: FinishReason | None = None
    error: RequestError | None = None

    def merge(self, later: Delta) -> None:
        """This, then that."""
        self.tokens += later.tokens
        self.logprobs += later.logprobs
        self.finish = later.finish or self.finish
        self.error = later.error or self.error

    def singly(self) -> Iterator[Delta]:
        """Token by token, then its end."""
        for place, token in enumerate(self.tokens):
            yield Delta(self.index, [token], self.logprobs[place : place + 1])
        if self.finish is not None or self.error is not None:
            yield Delta(self.index, finish=self.finish, error=self.error)


class Mailbox:
    """Deltas of one HTTP request's choices, merged per choice until the handler takes them."""

    def __init__(self) -> None:
        self._ready: dict[int, Delta] = {}  # insertion order: the choice that waits longest first
        self._something = asyncio.Event()
        self._waiting = False
        """All that came so far is with the client, or on its way there."""
        self.direct: Callable[[int, Sequence[int]], bool] | None = None
        """Sends plain tokens of a choice past the handler, or refuses to (`direct_events.py`)."""

    def put_plain(self, index: int, tokens: Sequence[int]) -> None:
        """Tokens and nothing else."""
        if self._waiting and self.direct is not None and self.direct(index, tokens):
            return
        self.put(index, tokens=tokens)

    def put(
        self,
        index: int,
        *,
        tokens: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob] = (),
        finish: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> None:
        delta = self._ready.setdefault(index, Delta(index))
        delta.tokens += tokens
        delta.logprobs += logprobs
        delta.finish = finish or delta.finish
        delta.error = error or delta.error
        self._waiting = False
        self._something.set()

    async def next(self) -> Delta:
        """Waits without a deadline of its own: the ledger ends every request by its deadline at the latest."""
        while not self._ready:
            self._something.clear()
            self._waiting = True
            try:
                await self._something.wait()
            finally:
                self._waiting = False
        return self._ready.pop(next(iter(self._ready)))


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks. `owner`: as `Key.owner`; `named`: an id of the client's that ours should begin with."""

    owner: str
    named: str
    arrived_s: float
    behind: int = 0
    """Added to the priority that it may ask for."""
    lease: Lease | None = None
    """None: no API key asked."""
    trace: RequestTrace | None = None


@dataclass(slots=True)
class GatewayTimes:
    """The gateway's own timestamps of a request (monotonic) and durations."""

    arrived_s: float
    tokenize_s: float = 0.0
    trace: RequestTrace | None = None
    judged: Judged | None = None
    """Told of each choice that had SLOs; None: no API key asked."""


@dataclass(slots=True)
class Generation:
    """All choices of one HTTP request. Without entries until it is admitted."""

    times: GatewayTimes
    mailbox: Mailbox = field(default_factory=Mailbox)
    entries: list[Entry] = field(default_factory=list)

    @property
    def request_ids(self) -> list[RequestId]:
        return [entry.request_id for entry in self.entries]


def ttft_stages(times: GatewayTimes, entry: Entry) -> dict[TtftStage, float]:
    """Parts that add up to the time to first token; empty before there is one.

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
    """Mean time per output token after the first; None when there is no second."""
    if entry.first_token_s is None or entry.last_token_s is None or len(entry.output) < 2:
        return None
    return (entry.last_token_s - entry.first_token_s) / (len(entry.output) - 1)


def slo_outcomes(slo: Slo, *, ttft_s: float | None, per_token_s: float | None, e2e_s: float | None) -> dict[str, bool]:
    """Objective → met, for every objective that was promised. A time that never came (None) misses its objective,
    except the one per token: an answer of one token has none."""
    outcomes: dict[str, bool] = {}
    if slo.ttft_s:
        outcomes["ttft"] = ttft_s is not None and ttft_s <= slo.ttft_s
    if slo.tpot_s and (per_token_s is not None or ttft_s is None):
        outcomes["tpot"] = per_token_s is not None and per_token_s <= slo.tpot_s
    if slo.deadline_s:
        outcomes["deadline"] = e2e_s is not None and e2e_s <= slo.deadline_s
    return outcomes
