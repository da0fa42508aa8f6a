"""What a planner may know of this gateway's requests: lengths and times, told to the monitor once a second.

`RequestStats` tells it of every request that is admitted and that ends; `service.py` sends what it has gathered. A
request has a number of its own here: no text, no token and no id that a client chose leaves this process.
"""

from __future__ import annotations

from collections import deque

import msgspec

from cohort.common.clock import Clock
from cohort.common.machines.entry import Entry
from cohort.common.planning.traffic import Timing, TrafficRecord
from cohort.common.types import FinishReason, Request, RequestId
from cohort.services.gateway.generation.delta import GatewayTimes, tpot_s

REPORT_EVERY_S = 1.0
_MAX_UNREPORTED = 4096
"""Records kept while the monitor is away; the oldest go first."""


class TrafficReport:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._open: dict[RequestId, tuple[int, float]] = {}
        """Number and arrival time of each open request."""
        self._count = 0
        self._unreported: deque[tuple[float, TrafficRecord]] = deque(maxlen=_MAX_UNREPORTED)

    def admitted(self, request: Request) -> None:
        number, now_s = self._count, self._clock.now_s()
        self._count += 1
        self._open[request.request_id] = (number, now_s)
        self._unreported.append((now_s, _record(number, request)))

    def ended(self, now_s: float, entry: Entry, times: GatewayTimes, finish: FinishReason) -> None:
        number, arrived_s = self._open.pop(entry.request_id, (-1, 0.0))
        if number < 0:
            return
        ended = _record(
            number,
            entry.request,
            output_tokens=len(entry.output),
            cached_tokens=entry.cached_tokens,
            timing=_timing(now_s, entry, times, finish),
            cancelled=finish is FinishReason.CANCELLED,
        )
        self._unreported.append((arrived_s, ended))

    def take(self) -> list[TrafficRecord]:
        """Return the records not reported yet, with ages as of now, and forget them."""
        now_s = self._clock.now_s()
        records = [msgspec.structs.replace(record, age_s=now_s - arrived_s) for arrived_s, record in self._unreported]
        self._unreported.clear()
        return records


def _record(
    number: int,
    request: Request,
    *,
    output_tokens: int = 0,
    cached_tokens: int = 0,
    timing: Timing | None = None,
    cancelled: bool = False,
) -> TrafficRecord:
    return TrafficRecord(
        number,
        0.0,
        request.prompt_tokens,
        request.traffic_class,
        request.slo,
        output_tokens,
        cached_tokens,
        timing,
        cancelled,
    )


def _timing(now_s: float, entry: Entry, times: GatewayTimes, finish: FinishReason) -> Timing:
    """Return a request's times; none for one that failed or was refused."""
    if finish is FinishReason.FAILED or entry.refused_because or entry.first_token_s is None:
        return Timing()
    return Timing(entry.first_token_s - times.arrived_s, tpot_s(entry) or 0.0, now_s - times.arrived_s)
