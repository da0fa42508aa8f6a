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
        """`owner_share`: of both bounds, for one owner, at least a request. `of_all`: for messages about divided
        bounds."""
        self._max_requests = max_waiting_requests
        self._max_tokens = max_waiting_tokens
        self._owner_share = owner_share
        self._of_all = of_all
        self._owner_requests = owner_requests(max_waiting_requests, owner_share)
        self._owner_tokens = int(owner_share * max_waiting_tokens)

    def decide(self, now_s: float, offer: Offer, load: AdmissionLoad) -> Admit | Refuse:
        tokens = offer.prompt_tokens + offer.predicted_tokens
        own, waiting = load.owner_requests if offer.owner else 0, load.waiting_requests
        of = f"keys.owner_share {self._owner_share:g} of"
        if own >= self._owner_requests:
            share = f"{self._owner_requests} ({of} gateway.max_waiting_requests {self._max_requests}{self._of_all})"
            return _refuse(load, own, f"{own} requests of this API key are waiting already, its share is {share}")
        if own and load.owner_tokens + tokens > self._owner_tokens:
            share = f"{self._owner_tokens} ({of} gateway.max_waiting_tokens {self._max_tokens}{self._of_all})"
            reason = f"{load.owner_tokens} tokens of this API key are waiting already, its share is {share}"
            return _refuse(load, own, reason)
        if waiting >= self._max_requests:
            return _refuse(load, waiting, f"{waiting} requests are waiting already")
        # A request larger than the whole bound must still get in when it is alone, or it never would.
        if waiting and load.waiting_tokens + tokens > self._max_tokens:
            return _refuse(load, waiting, f"{load.waiting_tokens} tokens are waiting already")
        return Admit()


def _refuse(load: AdmissionLoad, waiting_requests: int, reason: str) -> Refuse:
    drain_s = waiting_requests / load.drain_rate if load.drain_rate > 0 else UNKNOWN_RATE_RETRY_S
    return Refuse(reason, min(MAX_RETRY_S, max(MIN_RETRY_S, drain_s)))


def owner_requests(max_waiting_requests: int, owner_share: float) -> int:
    """Return how many requests of one owner may wait; at least one."""
    return max(1, int(owner_share * max_waiting_requests))
