"""The door: asks the admission policy with what the gateway knows, and turns a refusal into a 429.

Called by `openai_api.py` twice per HTTP request: with an estimate from the body's size before anything is read, and
with the real numbers after tokenising. The policy decides (`common/policies`); this file only gathers and translates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cohort.common.clock import Clock
from cohort.common.errors import RequestError
from cohort.common.messages import ClusterLoad
from cohort.common.policies.interface import Admission, AdmissionLoad, Offer, Refuse
from cohort.common.types import Request, Slo, TrafficClass
from cohort.services.gateway.ledger import Ledger

# Of JSON text around a prompt in English; only a first guess, the second question has the real number.
BYTES_PER_TOKEN = 4


class Door:
    def __init__(
        self,
        policy: Admission,
        ledger: Ledger,
        load: Callable[[], ClusterLoad | None],
        clock: Clock,
        *,
        expected_output: float,
    ) -> None:
        self._policy = policy
        self._ledger = ledger
        self._load = load
        self._clock = clock
        self._expected_output = expected_output

    def check_estimate(self, body_bytes: int, traffic_class: TrafficClass) -> None:
        """Before any work. Raises a 429 `RequestError`."""
        self._decide(
            Offer(
                prompt_tokens=body_bytes // BYTES_PER_TOKEN,
                max_tokens=0,
                predicted_tokens=self._expected_output,
                traffic_class=traffic_class,
                priority=0,
                slo=Slo(),
            ),
            ahead=0,
            ahead_tokens=0.0,
        )

    def check(self, requests: Sequence[Request]) -> None:
        """All choices of one HTTP request come in, or none. Raises a 429 `RequestError`."""
        ahead_tokens = 0.0
        for ahead, request in enumerate(requests):
            expected = min(self._expected_output, float(request.sampling.max_tokens))
            self._decide(
                Offer(
                    prompt_tokens=request.prompt_tokens,
                    max_tokens=request.sampling.max_tokens,
                    predicted_tokens=expected,
                    traffic_class=request.traffic_class,
                    priority=request.priority,
                    slo=request.slo,
                ),
                ahead=ahead,
                ahead_tokens=ahead_tokens,
            )
            ahead_tokens += request.prompt_tokens + expected

    def _decide(self, offer: Offer, *, ahead: int, ahead_tokens: float) -> None:
        """`ahead`: choices of the same HTTP request that would wait before this one."""
        load = self._load()
        own = self._ledger
        # Other gateways' requests show only in the manager's figure, our newest ones only in the ledger.
        waiting = max(own.waiting_requests, load.waiting if load else 0) + ahead
        tokens = max(own.waiting_tokens, float(load.waiting_tokens) if load else 0.0) + ahead_tokens
        decision = self._policy.decide(
            self._clock.now_s(),
            offer,
            AdmissionLoad(
                waiting_requests=waiting,
                waiting_tokens=int(tokens),
                running_requests=len(own) - own.waiting_requests,
                drain_rate=load.drain_rate if load else 0.0,
                free_tokens=load.free_tokens if load else 0,
                total_tokens=load.total_tokens if load else 0,
            ),
        )
        if isinstance(decision, Refuse):
            raise RequestError(
                f"The server is busy: {decision.reason}. Please retry later.",
                status=429,
                type_="rate_limit_error",
                retry_after_s=decision.retry_after_s,
            )
