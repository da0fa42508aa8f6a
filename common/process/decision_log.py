"""The latest decisions of a process, for people who look at the live page.

Written by the hosts of manager and workers as decisions pass by; read only while a person looks. Placements are many
and the rest is rare, so each has a ring of its own: a refusal is not swept away by the placements of the next second.
Decides nothing.
"""

from __future__ import annotations

from collections import deque

import msgspec

from cohort.common.types import InstanceId, RequestId
from cohort.common.views import MOST_DECISIONS, Decision, DecisionKind

_ORDINARY = 32
"""Number of placements that are kept."""


class DecisionLog:
    def __init__(self) -> None:
        self._rare: deque[tuple[float, Decision]] = deque(maxlen=MOST_DECISIONS - _ORDINARY)
        self._ordinary: deque[tuple[float, Decision]] = deque(maxlen=_ORDINARY)

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
        decision = Decision(0.0, kind, request_id, list(instances), reason, what, round(forecast_s, 3), count)
        ring.append((now_s, decision))

    def latest(self, now_s: float) -> list[Decision]:
        """Return the decisions, last one first, `MOST_DECISIONS` at most."""
        noted = sorted((*self._rare, *self._ordinary), key=lambda one: one[0], reverse=True)
        return [msgspec.structs.replace(decision, age_s=round(max(0.0, now_s - at_s), 3)) for at_s, decision in noted]
