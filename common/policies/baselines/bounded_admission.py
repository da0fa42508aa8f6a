"""Admission by bounded queue: a request may come in while fewer than so many requests and tokens wait.

The default `Admission`, asked by the gateway once with an estimate before any work and once with the real numbers.
Looks at what waits only: running requests have their memory already, and how many may run is the workers' business.
"""

from __future__ import annotations

from cohort.common.policies.interface import Admission, AdmissionLoad, Admit, Offer, Refuse

MIN_RETRY_S = 1.0
MAX_RETRY_S = 120.0
# Nothing finished yet, so nothing is known about the pace: a client may ask again soon.
UNKNOWN_RATE_RETRY_S = 5.0


class BoundedAdmission(Admission):
    """Refuses beyond either bound. Retry-After is the time the present queue takes to drain at the present pace."""

    def __init__(self, *, max_waiting_requests: int, max_waiting_tokens: int) -> None:
        self._max_requests = max_waiting_requests
        self._max_tokens = max_waiting_tokens

    def decide(self, now_s: float, offer: Offer, load: AdmissionLoad) -> Admit | Refuse:
        if load.waiting_requests >= self._max_requests:
            return Refuse(f"{load.waiting_requests} requests are waiting already", self._retry_after_s(load))
        tokens = offer.prompt_tokens + offer.predicted_tokens
        # A request larger than the whole bound must still get in when it is alone, or it never would.
        if load.waiting_requests and load.waiting_tokens + tokens > self._max_tokens:
            return Refuse(f"{load.waiting_tokens} tokens are waiting already", self._retry_after_s(load))
        return Admit()

    def _retry_after_s(self, load: AdmissionLoad) -> float:
        if load.drain_rate <= 0:
            return UNKNOWN_RATE_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, load.waiting_requests / load.drain_rate))
