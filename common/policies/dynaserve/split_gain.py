"""The gain of a split: how much sooner its two instances are done, less what other requests would have filled of that
time; and the work that a split at the end of a prompt saves, in seconds of the instance that computes the prompt.

Called by the placement; pure. `split_search` assumes that work costs the same wherever it runs. That does not hold on
unlike instances, nor where an iteration with prompts and decodes takes longer than both alone.
"""

from __future__ import annotations

import math
from collections import deque

from cohort.common.policies.dynaserve.instance_work import InstanceWork, work_seconds
from cohort.common.policies.dynaserve.timeline import SegmentWork

_REMEMBERED = 32
"""Placements that the rate is computed from."""
_LEAST = 4
"""Least number of placements for a rate."""
PRICED = 0.15
"""Least learned cost of mixing at which decodes run apart. That saves at most half of it, and every request has a
longer gap where it changes hands: at 0.1, two A100 and the 14B model served 0 to 2 % more and 27 % of the requests had
a gap beyond the bound. Fits scatter by up to 0.1 where mixing costs nothing."""


class PlacementRate:
    """Rate of the latest placements. 0 while too few are known: then a split counts in full."""

    def __init__(self) -> None:
        self._times_s: deque[float] = deque(maxlen=_REMEMBERED)

    def placed(self, now_s: float) -> None:
        self._times_s.append(now_s)

    def per_s(self, now_s: float) -> float:
        """Return requests per second since the oldest remembered placement: a pause lowers it while it lasts."""
        if len(self._times_s) < _LEAST:
            return 0.0
        since_s = now_s - self._times_s[0]
        return len(self._times_s) / since_s if since_s > 0.0 else 0.0


def split_gain_s(
    whole_s: float, later_s: float, other_before_s: float, other_after_s: float, requests_per_s: float
) -> float:
    """D3 · Return the seconds by which the split brings the end forward, weighed by the chance that they would have
    been lost.

    With the whole request on one instance both are done at `whole_s`, split at `later_s`. The other instance, whose
    work ends at `other_before_s`, then works until `other_after_s`. Without that work it would be idle at time t in
    between only if no request came until t: with Poisson arrivals at rate λ (`requests_per_s`) the chance is e^(−λt),
    here averaged over the time in between.

    Differs from the paper: Alg. 1 takes every difference between the two ends for a gain (λ = 0). Under load the
    instance that ends sooner gets the next request anyway; only the cost of a split remains.
    """
    gain_s = whole_s - later_s
    given_s = other_after_s - other_before_s
    if gain_s <= 0.0 or given_s <= 0.0:
        return max(0.0, gain_s)
    lost = requests_per_s * given_s
    # (1 − e^−x) / x, the mean of e^−λt over the time in between, relative to its beginning.
    mean = -math.expm1(-lost) / lost if lost > 1e-9 else 1.0
    return gain_s * math.exp(-requests_per_s * other_before_s) * mean


def saved_by_moving_s(prompts: InstanceWork, decodes: InstanceWork, whole: SegmentWork) -> float:
    """D3 · Return the seconds saved if `decodes` takes the response and `prompts` computes prompts instead; negative if
    it costs more there.

    Under load a response costs as many prompt tokens as could have been computed meanwhile: few on an instance with
    much bandwidth for its compute. On equal instances the result is 0.
    """
    response = SegmentWork(0, whole.prefill, whole.decode)
    own, other = prompts.times, decodes.times
    return work_seconds(own, response) - work_seconds(other, response) * own.token_s / other.token_s


def unmixed_s(prompts: InstanceWork, decodes: InstanceWork, whole: SegmentWork) -> float:
    """D3 · Return the seconds saved where mixing prompts and decodes costs time: every response of an instance shares
    in that cost of its iterations.

    An instance with hardly any decodes saves a whole iteration's cost for every token, one with many next to nothing:
    instances with few decodes pass theirs on and end without any.
    """
    share = prompts.times.mixed_share
    if share < PRICED:
        return 0.0
    fewer = 1.0 / (prompts.decodes + 1) - 1.0 / (decodes.decodes + 1)
    return max(0.0, share * prompts.pass_s * whole.decode * fewer)
