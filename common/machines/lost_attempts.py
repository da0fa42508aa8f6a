"""Attempts that a manager gave back to their gateways a moment ago.

    AttemptsLost ──▶ awaited, `RESUBMIT_S` at most ──▶ Submit of the next attempt
         └─────────▶ known to be told, `_SAID_S` ──▶ told again if its gateway still names it

Lost work goes before work that came later, so placements wait for it; and what a gateway named before it heard of the
loss (`Outstanding` crosses `AttemptsLost`, many times where a process is behind with its messages) is not told and
counted again. Called by `ManagerMachine`; sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from cohort.common.types import Attempt, RequestId

RESUBMIT_S = 0.1
"""The longest placements wait for lost attempts to come again: far more than the way there and back."""
_SAID_S = 1.5
"""So long an attempt counts as told. Gateways name theirs every second: if the word was lost, the second one after it
brings another."""


class LostAttempts:
    def __init__(self) -> None:
        self._awaited: dict[RequestId, float] = {}
        """Requests whose next attempt is on its way here, and until when placements wait for it."""
        self._said: dict[Attempt, float] = {}
        """In the order of the times at which their gateway was told last."""

    def say(self, now_s: float, attempts: Iterable[Attempt]) -> list[Attempt]:
        """Those of them that their gateway has to be told of; it counts as told."""
        said = self._said
        while said and now_s - next(iter(said.values())) >= _SAID_S:
            del said[next(iter(said))]
        news = [attempt for attempt in attempts if attempt not in said]
        for attempt in news:
            said[attempt] = now_s
            self._awaited[attempt.request_id] = now_s + RESUBMIT_S
        return news

    def came(self, request_id: RequestId) -> None:
        """Its next attempt is here, or it is over."""
        self._awaited.pop(request_id, None)

    def awaited(self, now_s: float) -> bool:
        """Whether placements have to wait."""
        if self._awaited:
            self._awaited = {name: until_s for name, until_s in self._awaited.items() if now_s < until_s}
        return bool(self._awaited)

    @property
    def until_s(self) -> float | None:
        """When they wait no longer, as it looks now."""
        return max(self._awaited.values(), default=None)

    def clear(self) -> None:
        self._awaited.clear()
        self._said.clear()
