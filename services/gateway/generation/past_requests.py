"""The latest requests of this gateway, for people who look at the live page.

`RequestStats` reports every end, for one record each; `show.py` reads them only while a person looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from cohort.common.machines.entry import Entry, State
from cohort.common.types import FinishReason, RequestId
from cohort.common.views import MOST_ID, Moment, RequestBrief, RequestLife, RequestState, WorkerTimes
from cohort.services.gateway.generation.delta import GatewayTimes, slo_outcomes, tpot_s, ttft_stages

KEPT = 512
"""Ended requests that are remembered; attainment "of late" is theirs."""
_OPEN: dict[State, RequestState] = {
    State.OPEN: "open",
    State.WAITING: "waiting",
    State.PLACED: "placed",
    State.RUNNING: "running",
}


@dataclass(frozen=True, slots=True)
class Past:
    """Ended request. Ages in `life` count from `ended_at_s` (the gateway's clock)."""

    life: RequestLife
    ended_at_s: float


class PastRequests:
    def __init__(self) -> None:
        self._past: deque[Past] = deque(maxlen=KEPT)

    def ended(self, now_s: float, entry: Entry, times: GatewayTimes, finish: FinishReason, reason: str) -> None:
        self._past.append(Past(life_of(now_s, entry, times, finish, reason), now_s))

    def latest(self) -> Iterable[Past]:
        """Return the remembered requests, the last to end first."""
        return reversed(self._past)

    def find(self, request_id: RequestId) -> Past | None:
        return next((past for past in reversed(self._past) if past.life.request_id == request_id), None)


def life_of(
    now_s: float, entry: Entry, times: GatewayTimes, finish: FinishReason | None = None, reason: str = ""
) -> RequestLife:
    request, arrived_s = entry.request, times.arrived_s
    slo = {name: value for name in ("ttft_s", "tpot_s", "deadline_s") if (value := getattr(request.slo, name))}
    return RequestLife(
        request_id=entry.request_id[:MOST_ID],
        traffic_class=request.traffic_class,
        state=_state(entry, finish),
        age_s=now_s - arrived_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=len(entry.output),
        cached_tokens=entry.cached_tokens,
        max_tokens=request.sampling.max_tokens,
        predicted=entry.prediction.mean if entry.prediction is not None else 0.0,
        attempts=entry.attempt.number + 1,
        instances=list(entry.instances),
        stages={str(stage): seconds for stage, seconds in ttft_stages(times, entry).items()},
        moments=[Moment(each.at_s - arrived_s, each.what, each.where, each.why) for each in entry.moments],
        times=[
            WorkerTimes(name, part.queue_s, part.prefill_s, part.transfer_s, part.decode_s, part.preemptions)
            for name, part in entry.times.items()
        ],
        slo=slo,
        outcomes={} if finish is None else _outcomes(now_s, entry, times, finish),
        first_token_s=_since(entry.first_token_s, arrived_s),
        last_token_s=_since(entry.last_token_s, arrived_s),
        ended_s=None if finish is None else now_s - arrived_s,
        placement=entry.placement_reason,
        reason=entry.refused_because or reason,
        best_effort=entry.best_effort,
        forecast_s=entry.forecast_s,
    )


def brief_of(life: RequestLife, ended_ago_s: float | None) -> RequestBrief:
    """Return a request's summary. The `life` of an ended one has the age at which it ended."""
    ttft_s = life.first_token_s
    return RequestBrief(
        life.request_id,
        life.traffic_class,
        life.state,
        round(life.age_s + (ended_ago_s or 0.0), 3),
        life.prompt_tokens,
        life.output_tokens,
        life.attempts,
        life.instances,
        None if ended_ago_s is None else round(ended_ago_s, 3),
        None if ttft_s is None else round(ttft_s, 4),
        not all(life.outcomes.values()),
    )


def _outcomes(now_s: float, entry: Entry, times: GatewayTimes, finish: FinishReason) -> dict[str, bool]:
    """Judge SLOs as `RequestStats` does: refused requests miss all, cancelled ones are not judged."""
    slo = entry.request.slo
    if entry.refused_because:
        return slo_outcomes(slo, ttft_s=None, per_token_s=None, e2e_s=None)
    if finish is FinishReason.CANCELLED:
        return {}
    return slo_outcomes(
        slo,
        ttft_s=_since(entry.first_token_s, times.arrived_s),
        per_token_s=tpot_s(entry),
        e2e_s=None if finish is FinishReason.FAILED else now_s - times.arrived_s,
    )


def _state(entry: Entry, finish: FinishReason | None) -> RequestState:
    if finish is None:
        return _OPEN[entry.state]
    if entry.refused_because:
        return "refused"
    match finish:
        case FinishReason.FAILED:
            return "failed"
        case FinishReason.CANCELLED:
            return "cancelled"
        case _:
            return "finished"


def _since(at_s: float | None, arrived_s: float) -> float | None:
    return None if at_s is None else at_s - arrived_s
