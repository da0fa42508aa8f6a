"""Attempts that a manager gave back to their gateways a moment ago.

    AttemptsLost ──▶ awaited, `RESUBMIT_S` at most ──▶ Submit of the next attempt
         └─────────▶ told, `_SAID_S` ──▶ told again if its gateway still names it, `2 _SAID_S` ──▶ told again …

Lost work goes before work that came later, so placements wait for it. What a gateway still names was either named
before it heard of the loss (`Outstanding` crosses `AttemptsLost`, many times where a process is seconds behind with its
messages), or the word was lost: it is told again, ever more seldom, and counts as lost once. Called by
`ManagerMachine`; sends nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from cohort.common.types import Attempt, RequestId

RESUBMIT_S = 0.1
"""The longest placements wait for lost attempts to come again: far more than the way there and back."""
_SAID_S = 1.5
"""So long an attempt counts as told; each further time twice as long. Gateways name theirs every second: if the word
was lost, the second one after it brings another."""
_LONGEST_S = 12.0
_REMEMBERED_S = 60.0
"""Since it was told last; more than `_LONGEST_S`. Who names it after that names an attempt that is lost anew."""


class LostAttempts:
    def __init__(self) -> None:
        self._awaited: dict[RequestId, float] = {}
        """Requests whose next attempt is on its way here, and until when placements wait for it."""
        self._said: dict[Attempt, tuple[float, float]] = {}
        """When its gateway was told last, in that order, and how long it counts as told."""

    def say(self, now_s: float, attempts: Iterable[Attempt]) -> tuple[list[Attempt], list[Attempt]]:
        """Those of them that their gateway has to be told of: for the first time, and again. They count as told."""
        said = self._said
        while said and now_s - next(iter(said.values()))[0] >= _REMEMBERED_S:
            del said[next(iter(said))]
        news, again = [], []
        for attempt in attempts:
            told_s, wait_s = said.get(attempt, (now_s, 0.0))
            if not wait_s:
                news.append(attempt)
                said[attempt] = now_s, _SAID_S
            elif now_s - told_s >= wait_s:
                again.append(attempt)
                assert wait_s <= _LONGEST_S < _REMEMBERED_S, f"{attempt} counts as told for {wait_s} s"
                del said[attempt]  # to the end of the order
                said[attempt] = now_s, min(2 * wait_s, _LONGEST_S)
        return news, again

    def expect(self, now_s: float, attempts: Iterable[Attempt]) -> None:
        """Placements wait for the next attempts of these."""
        self._awaited.update((attempt.request_id, now_s + RESUBMIT_S) for attempt in attempts)

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
