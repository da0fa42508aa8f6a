"""The admission test of a request with a TTFT SLO: served, demoted to best-effort, or refused at once.

    predicted in time, or nothing to keep ───────────────▶ serve
    predicted late ┬ the operator or the client wants it ▶ serve (behind all that are in time)
                   ├ if_late: best_effort ───────────────▶ best_effort
                   └ if_late: refuse ────────────────────▶ Refuse, with the time after which it would be in time

A pure function of a prediction and a due time, asked by placements that predict a TTFT. Best-effort requests, batch
work and requests that were accepted before are always served.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from cohort.common.policies.cohort.promise import targets
from cohort.common.policies.interface import MIN_RETRY_S, Refuse, WaitingRequest
from cohort.common.types import IfLate

RefuseLate = Literal["named", "all", "none"]
"""Requests that may be refused or demoted: those that named a TTFT SLO or an outcome; all real-time ones; none."""

INFEASIBLE = "infeasible"
"""Cause of these refusals in messages and metrics."""

_UNPREDICTED = 200.0
"""Tokens expected of a response without a prediction."""

CAUTION = 0.5
"""Factor on a predicted TTFT, which is uncertain: shorter prompts come later, rows end sooner. At 1 requests are
refused that would have been in time, and the share that keeps its SLO is up to 3 points lower than without refusals; at
a half it is up to 3 points higher (simulated, four A100, 1.2 of capacity)."""


def admission_test(
    now_s: float, due_s: float, predicted_s: float, if_late: IfLate, refuse_late: RefuseLate, caution: float = CAUTION
) -> Literal["serve", "best_effort"] | Refuse:
    """Decide on a request. `predicted_s`: seconds from now to the first token. `due_s`: when the SLO wants it, on the
    clock of `now_s`. The time to retry after is how late the request would be."""
    late_s = now_s + caution * predicted_s - due_s
    if late_s <= 0.0:
        return "serve"
    if refuse_late == "none" or (if_late == "" and refuse_late != "all"):
        return "serve"
    outcome = if_late or "refuse"
    return Refuse(INFEASIBLE, max(MIN_RETRY_S, late_s)) if outcome == "refuse" else outcome


@dataclass(frozen=True, slots=True)
class AdmissionTest:
    """Admission test as a placement applies it."""

    refuse_late: RefuseLate = "named"
    caution: float = CAUTION

    def judge(
        self, now_s: float, waiting: WaitingRequest, predicted_s: float
    ) -> Literal["serve", "best_effort"] | Refuse:
        """Decide on a request whose first token the fastest worker yields in `predicted_s` seconds."""
        request = waiting.request
        real_time = request.traffic_class == "rt" and request.online
        if not real_time or waiting.accepted or not (request.slo.ttft_s > 0.0 or request.slo.deadline_s > 0.0):
            return "serve"
        ttft_s, _ = targets(request.slo, waiting.expected_output(_UNPREDICTED))
        due_s = waiting.since_s + ttft_s
        verdict = admission_test(now_s, due_s, predicted_s, request.if_late, self.refuse_late, caution=self.caution)
        if isinstance(verdict, Refuse):
            return replace(verdict, forecast_s=self.forecast_s(now_s, waiting, predicted_s))
        return verdict

    def forecast_s(self, now_s: float, waiting: WaitingRequest, predicted_s: float) -> float:
        """Return the predicted TTFT, counted from the request's arrival here."""
        return now_s - waiting.since_s + predicted_s
