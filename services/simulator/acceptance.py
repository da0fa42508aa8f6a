"""Whether drafted tokens are right, of a simulation: one rate for each request, about a mean that a live server showed.

A live worker's counters say the mean (`cohort_accepted_tokens_total` over `cohort_drafted_tokens_total`, read as the
chance of one token). Requests differ: some quote their prompt, most do not. What a request's drafts do depends on the
seed, the request's number and the position alone. Asked by the clients, who play the model; decides nothing.
"""

from __future__ import annotations

from functools import lru_cache
from random import Random

_SPREAD = 1.0
"""Of the rates, a beta distribution: both its parameters add up to this. One: most rates lie near 0 or near 1."""


class Acceptance:
    def __init__(self, mean: float, seed: int) -> None:
        """`mean` 0: nothing is ever expected, so nothing is drafted."""
        self._mean, self._seed = mean, seed
        self.rate = lru_cache(maxsize=65536)(self._rate)
        """Of a request, by its number."""

    def __bool__(self) -> bool:
        return self._mean > 0.0

    def right(self, request: int, position: int, drafts: int) -> int:
        """How many tokens from this position on are as drafted, of so many."""
        chances, rate = Random(self._seed * 1_000_003 + request * 10_007 + position), self.rate(request)
        for count in range(drafts):
            if chances.random() >= rate:
                return count
        return drafts

    def _rate(self, request: int) -> float:
        if self._mean >= 1.0:
            return 1.0
        drawn = Random(f"{self._seed} {request}")
        return drawn.betavariate(_SPREAD * self._mean, _SPREAD * (1.0 - self._mean))
