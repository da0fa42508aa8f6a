"""The latest decisions of a process, for people who look at the live page.

Written by the hosts of manager and workers as decisions pass by, at the cost of one append; read only while a person
looks. Placements are many and the rest is rare, so each has a ring of its own: a refusal is not swept away by the
placements of the next second. Decides nothing.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from cohort.common.types import InstanceId, RequestId
from cohort.common.views import MOST_DECISIONS, Decision, DecisionKind

_ORDINARY = 32
"""Number of placements that are kept."""


class _Noted(NamedTuple):
    at_s: float
    kind: DecisionKind
    request_id: RequestId
    instances: tuple[InstanceId, ...]
    reason: str
    what: str
    forecast_s: float
    attempts: int


class DecisionLog:
    def __init__(self) -> None:
        self._rare: deque[_Noted] = deque(maxlen=MOST_DECISIONS - _ORDINARY)
        self._ordinary: deque[_Noted] = deque(maxlen=_ORDINARY)

    def note(
        self,
        now_s: float,
        kind: DecisionKind,
        request_id: RequestId,
        *,
        instances: tuple[InstanceId, ...] = (),
        reason: str = "",
        what: str = "",
        forecast_s: float = 0.0,
        count: int = 1,
    ) -> None:
        ring = self._ordinary if kind == "placed" else self._rare
        ring.append(_Noted(now_s, kind, request_id, instances, reason, what, forecast_s, count))

    def latest(self, now_s: float) -> list[Decision]:
        """Return the decisions, last one first, `MOST_DECISIONS` at most."""
        noted = sorted((*self._rare, *self._ordinary), key=lambda one: one.at_s, reverse=True)
        return [
            Decision(
                round(max(0.0, now_s - one.at_s), 3),
                one.kind,
                one.request_id,
                list(one.instances),
                one.reason,
                one.what,
                round(one.forecast_s, 3),
                one.attempts,
            )
            for one in noted
        ]
