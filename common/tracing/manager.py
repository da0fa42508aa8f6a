"""The manager's part of a trace: how long a request waited for a worker, where it went and why.

    queue ─────────────▶ placement            bind, lost: one moment each

Told of every call of the machine by `observed.py`. Keeps the traceparent of requests it has seen until they end, a
bounded number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cohort.common.machines.effects import ManagerEffect, Send
from cohort.common.machines.events import ManagerEvent, Received
from cohort.common.messages import AttemptsLost, BindSegment, Cancel, Message, Placed, Refused, SegmentEnded, Submit
from cohort.common.tracing.spans import Tracing
from cohort.common.tracing.traceparent import TraceParent, parse
from cohort.common.types import Attempt, Outcome

MOST = 65_536
"""Number of attempts that are remembered; beyond it, the oldest loses what is left of its trace here."""


@dataclass(slots=True)
class _Seen:
    parent: TraceParent
    submitted_s: float
    placed: bool = False


class ManagerSpans:
    def __init__(self, tracing: Tracing) -> None:
        self._tracing = tracing
        self._seen: dict[Attempt, _Seen] = {}

    def __len__(self) -> int:
        return len(self._seen)

    def handled(
        self, now_s: float, took_s: float, events: Sequence[ManagerEvent], effects: Sequence[ManagerEffect]
    ) -> None:
        over: list[Attempt] = []
        for event in events:
            match event:
                case Received(message=Submit(request=request)) if request.traceparent:
                    self._submitted(now_s, request.attempt, request.traceparent)
                case Received(message=Cancel(attempts=attempts)):
                    over += attempts
                case Received(message=SegmentEnded(attempt=attempt, outcome=outcome)):
                    if outcome in (Outcome.FINISHED, Outcome.CANCELLED):
                        over.append(attempt)
                case _:
                    pass
        if not self._seen:
            return
        for effect in effects:
            if isinstance(effect, Send):
                self._sent(now_s, now_s + took_s, effect.message)
        for attempt in over:
            self._seen.pop(attempt, None)

    def _submitted(self, now_s: float, attempt: Attempt, traceparent: str) -> None:
        parent = parse(traceparent)
        if parent is not None and attempt not in self._seen:
            self._seen[attempt] = _Seen(parent, now_s)
            if len(self._seen) > MOST:
                del self._seen[next(iter(self._seen))]

    def _sent(self, now_s: float, decided_s: float, message: Message) -> None:
        match message:
            case Placed(attempt=attempt):
                seen = self._seen.get(attempt)
                if seen is not None and not seen.placed:
                    seen.placed = True
                    name = attempt.request_id
                    self._tracing.span("queue", seen.submitted_s, now_s, seen.parent, request_id=name)
                    self._tracing.span(
                        "placement",
                        now_s,
                        decided_s,
                        seen.parent,
                        request_id=name,
                        attempt=attempt.number,
                        workers=",".join(message.instances),
                        reason=message.reason,
                        best_effort=message.best_effort,
                        forecast_ttft_s=message.forecast_s,
                    )
            case Refused(attempt=attempt, reason=reason):
                seen = self._seen.pop(attempt, None)
                if seen is not None:
                    self._tracing.span("queue", seen.submitted_s, decided_s, seen.parent, error=reason)
            case AttemptsLost(attempts=attempts, reason=reason):
                for attempt in attempts:
                    seen = self._seen.pop(attempt, None)
                    if seen is not None:
                        self._tracing.span(
                            "attempt lost", now_s, now_s, seen.parent, error=reason, attempt=attempt.number
                        )
            case BindSegment(attempt=attempt, segment=segment):
                seen = self._seen.get(attempt)
                if seen is not None:
                    self._tracing.span("bind", now_s, decided_s, seen.parent, worker=segment.instance or "")
            case _:
                pass
