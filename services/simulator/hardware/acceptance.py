"""Whether drafted tokens are right, of a simulation: rates of requests about a mean, or those of a recorded worker.

A live worker's counters say the mean (`cohort_accepted_tokens_total` over `cohort_drafted_tokens_total`, read as the
chance of one token); its recording (`recorded_drafts`) says each request's. Requests differ: some quote their prompt,
most do not. What a request's drafts do depends on the seed, the request's number and the position alone. Asked by the
clients, who play the model; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

_SPREAD = 1.0
"""Of the rates, a beta distribution: both its parameters add up to this. One: most rates lie near 0 or near 1."""


class DraftRates(NamedTuple):
    """Of a request. `expected`: the share of its tokens behind which something was expected; `right`: the chance of an
    expected token to come, if those before it did."""

    expected: float
    right: float


class Acceptance:
    def __init__(self, mean: float, seed: int, recorded: Sequence[DraftRates] = ()) -> None:
        """`mean` 0: nothing is ever expected, so nothing is drafted. `recorded`: in the place of a mean; requests take
        them in their order, over and over."""
        self._mean, self._seed, self._recorded = mean, seed, recorded
        self.rates = lru_cache(maxsize=65536)(self._rates)
        """Of a request, by its number."""

    def __bool__(self) -> bool:
        return self._mean > 0.0 or any(each.expected * each.right > 0.0 for each in self._recorded)

    def expects(self, request: int, position: int) -> bool:
        """Something is expected from this position on."""
        share = self.rates(request).expected
        return share >= 1.0 or Random(f"{self._seed} {request} {position}").random() < share

    def right(self, request: int, position: int, drafts: int) -> int:
        """How many tokens from this position on are as drafted, of so many."""
        chances, rate = Random(self._seed * 1_000_003 + request * 10_007 + position), self.rates(request).right
        for count in range(drafts):
            if chances.random() >= rate:
                return count
        return drafts

    def _rates(self, request: int) -> DraftRates:
        if self._recorded:
            return self._recorded[request % len(self._recorded)]
        if self._mean >= 1.0:
            return DraftRates(1.0, 1.0)
        drawn = Random(f"{self._seed} {request}")
        return DraftRates(1.0, drawn.betavariate(_SPREAD * self._mean, _SPREAD * (1.0 - self._mean)))
