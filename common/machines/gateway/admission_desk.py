"""Whether a request may come in: asks the admission policy with what the gateway knows.

Called by `gateway.py` twice per HTTP request: with an estimate from the body's size before anything is read, and with
the real numbers after tokenising. The policy decides (`common/policies`); this file gathers what it decides on: the
requests that wait altogether and, where several API keys share the gateway, those of the same owner.
"""

from __future__ import annotations

from collections.abc import Sequence

from cohort.common.machines.gateway.ledger import Ledger
from cohort.common.messages import ClusterLoad
from cohort.common.policies.interface import Admission, AdmissionLoad, Offer, Refuse
from cohort.common.types import Request, Slo, TrafficClass

# Of JSON text around a prompt in English; only a first guess, the second question has the real number.
BYTES_PER_TOKEN = 4


class AdmissionDesk:
    def __init__(self, policy: Admission, ledger: Ledger, *, expected_output: float) -> None:
        self._policy = policy
        self._ledger = ledger
        self._expected_output = expected_output

    def estimate(
        self, now_s: float, body_bytes: int, traffic_class: TrafficClass, load: ClusterLoad | None, owner: str = ""
    ) -> Refuse | None:
        """Before any work. `owner`: as in `Offered`."""
        offer = Offer(
            prompt_tokens=body_bytes // BYTES_PER_TOKEN,
            max_tokens=0,
            predicted_tokens=self._expected_output,
            traffic_class=traffic_class,
            priority=0,
            slo=Slo(),
            owner=owner,
        )
        return self._decide(now_s, offer, load, ahead=0, ahead_tokens=0.0)

    def expected_output(self, request: Request, owner: str, *, max_tokens_named: bool) -> float:
        """Tokens that a request counts with while it waits: what is predicted by default, or all that it asks for.

        An owner's share is counted by what was asked for: a key could otherwise queue any length as if it were short.
        Where nothing is shared out the prediction is the better measure of what the queue holds.
        """
        asked = float(request.sampling.max_tokens)
        return asked if owner and max_tokens_named else min(self._expected_output, asked)

    def decide(
        self,
        now_s: float,
        requests: Sequence[Request],
        load: ClusterLoad | None,
        owner: str = "",
        *,
        max_tokens_named: bool = False,
    ) -> Refuse | None:
        """All choices of one HTTP request come in, or none. `owner`, `max_tokens_named`: as in `Offered`."""
        ahead_tokens = 0.0
        for ahead, request in enumerate(requests):
            expected = self.expected_output(request, owner, max_tokens_named=max_tokens_named)
            offer = Offer(
                prompt_tokens=request.prompt_tokens,
                max_tokens=request.sampling.max_tokens,
                predicted_tokens=expected,
                traffic_class=request.traffic_class,
                priority=request.priority,
                slo=request.slo,
                owner=owner,
            )
            refusal = self._decide(now_s, offer, load, ahead=ahead, ahead_tokens=ahead_tokens)
            if refusal is not None:
                return refusal
            ahead_tokens += request.prompt_tokens + expected
        return None

    def _decide(
        self, now_s: float, offer: Offer, load: ClusterLoad | None, *, ahead: int, ahead_tokens: float
    ) -> Refuse | None:
        """`ahead`: choices of the same HTTP request that would wait before this one."""
        own = self._ledger
        # Other gateways' requests show only in the manager's load, our newest ones only in the ledger.
        waiting = max(own.waiting_requests, load.waiting if load else 0) + ahead
        tokens = max(own.waiting_tokens, float(load.waiting_tokens) if load else 0.0) + ahead_tokens
        theirs = own.waiting_of(offer.owner)
        decision = self._policy.decide(
            now_s,
            offer,
            AdmissionLoad(
                waiting_requests=waiting,
                waiting_tokens=int(tokens),
                running_requests=len(own) - own.waiting_requests,
                drain_rate=load.drain_rate if load else 0.0,
                free_tokens=load.free_tokens if load else 0,
                total_tokens=load.total_tokens if load else 0,
                owner_requests=theirs.requests + ahead,
                owner_tokens=int(theirs.tokens + ahead_tokens),
            ),
        )
        return decision if isinstance(decision, Refuse) else None
