"""Admission by bounded queue: a request may come in while fewer than so many requests and tokens wait.

The default `Admission`, asked by the gateway with an estimate before any work and again with the real numbers. Only
what waits counts. Where several API keys share the gateway, each may fill a share of both bounds.
"""

from __future__ import annotations

from cohort.common.policies.interface import MAX_RETRY_S, MIN_RETRY_S, Admission, AdmissionLoad, Admit, Offer, Refuse

# Nothing finished yet, so nothing is known about the pace: a client may ask again soon.
UNKNOWN_RATE_RETRY_S = 5.0


class BoundedAdmission(Admission):
    """Refuse beyond either bound. Retry-After is the time the present queue takes to drain at the present pace."""

    def __init__(
        self, *, max_waiting_requests: int, max_waiting_tokens: int, owner_share: float = 1.0, of_all: str = ""
    ) -> None:
        """`owner_share`: of both bounds, for one owner; 0 leaves each owner one request. `of_all`: for messages, where
        the bounds are a part of the configured ones."""
        self._max_requests = max_waiting_requests
        self._max_tokens = max_waiting_tokens
        self._owner_share = owner_share
        self._of_all = of_all
        self._owner_requests = owner_requests(max_waiting_requests, owner_share)
        self._owner_tokens = int(owner_share * max_waiting_tokens)

    def decide(self, now_s: float, offer: Offer, load: AdmissionLoad) -> Admit | Refuse:
        refusal = self._beyond_share(offer, load) if offer.owner else None
        return refusal or self._beyond_bounds(offer, load)

    def _beyond_share(self, offer: Offer, load: AdmissionLoad) -> Refuse | None:
        of = f"gateway.owner_share {self._owner_share:g} of"
        if load.owner_requests >= self._owner_requests:
            share = f"{self._owner_requests} ({of} gateway.max_waiting_requests {self._max_requests}{self._of_all})"
            return Refuse(
                f"{load.owner_requests} requests of this API key are waiting already, its share is {share}",
                self._retry_after_s(load, load.owner_requests),
            )
        tokens = offer.prompt_tokens + offer.predicted_tokens
        if load.owner_requests and load.owner_tokens + tokens > self._owner_tokens:
            share = f"{self._owner_tokens} ({of} gateway.max_waiting_tokens {self._max_tokens}{self._of_all})"
            return Refuse(
                f"{load.owner_tokens} tokens of this API key are waiting already, its share is {share}",
                self._retry_after_s(load, load.owner_requests),
            )
        return None

    def _beyond_bounds(self, offer: Offer, load: AdmissionLoad) -> Admit | Refuse:
        if load.waiting_requests >= self._max_requests:
            return Refuse(
                f"{load.waiting_requests} requests are waiting already",
                self._retry_after_s(load, load.waiting_requests),
            )
        tokens = offer.prompt_tokens + offer.predicted_tokens
        # A request larger than the whole bound must still get in when it is alone, or it never would.
        if load.waiting_requests and load.waiting_tokens + tokens > self._max_tokens:
            return Refuse(
                f"{load.waiting_tokens} tokens are waiting already", self._retry_after_s(load, load.waiting_requests)
            )
        return Admit()

    def _retry_after_s(self, load: AdmissionLoad, waiting_requests: int) -> float:
        if load.drain_rate <= 0:
            return UNKNOWN_RATE_RETRY_S
        return min(MAX_RETRY_S, max(MIN_RETRY_S, waiting_requests / load.drain_rate))


def owner_requests(max_waiting_requests: int, owner_share: float) -> int:
    """Return how many requests of one owner may wait; at least one."""
    return max(1, int(owner_share * max_waiting_requests))
