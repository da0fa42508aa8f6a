"""The gain of a split: how much sooner its two instances are done, less what other requests would have filled of that
time.

Asked by the placement before it splits a request. Knows when requests were placed, nothing else of the cluster; pure.
"""

from __future__ import annotations

import math
from collections import deque

_REMEMBERED = 32
"""Placements that the rate is taken from."""
_LEAST = 4
"""Below so many the rate counts as unknown."""


class PlacementRate:
    """Requests placed a second, lately. 0 while too little is known: then a split counts in full."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_REMEMBERED)

    def placed(self, now_s: float) -> None:
        self._times_s.append(now_s)

    def per_s(self, now_s: float) -> float:
        """Of those remembered, over the time since the first of them: a pause lowers it while it lasts."""
        if len(self._times_s) < _LEAST:
            return 0.0
        since_s = now_s - self._times_s[0]
        return len(self._times_s) / since_s if since_s > 0.0 else 0.0


def split_gain_s(
    whole_s: float, later_s: float, other_before_s: float, other_after_s: float, requests_per_s: float
) -> float:
    """D3 · seconds by which the split brings the end forward, weighed by the chance that they would have been lost.

    With the whole request on one instance both are done at `whole_s`, split at `later_s`. The other instance, whose
    work ends at `other_before_s`, then works until `other_after_s`. Had it not been given that work, it would have
    stood idle at time t in between only if no request came until t, as the next one goes where it would wait least:
    with Poisson arrivals at rate λ (`requests_per_s`) that is e^(−λt), here averaged over the time in between.

    Differs from the paper: Alg. 1 takes every difference between the two ends for a gain. It is one for the last
    request of all (λ = 0, the same here). Under load the instance that ends sooner gets the next request anyway; of a
    split only its cost remains.
    """
    gain_s = whole_s - later_s
    given_s = other_after_s - other_before_s
    if gain_s <= 0.0 or given_s <= 0.0:
        return max(0.0, gain_s)
    lost = requests_per_s * given_s
    # (1 − e^−x) / x, the mean of e^−λt over the time in between, relative to its beginning.
    mean = -math.expm1(-lost) / lost if lost > 1e-9 else 1.0
    return gain_s * math.exp(-requests_per_s * other_before_s) * mean
