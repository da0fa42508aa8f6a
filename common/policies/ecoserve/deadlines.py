"""E9 · When a request should be complete: its SLO, or the time of an undisturbed run, times a scale.

Owned by `TimeSynced`; ordering (E6) and the choice of borrowers (E7) ask it.
"""

from __future__ import annotations

from cohort.common.policies.interface import Ran
from cohort.common.sequence import Sequence

_SCALE = 2.0
"""A request without an SLO is late after twice what it would take undisturbed."""


class Deadlines:
    """E9 · EcoServe §4: SLO = scale · (t_p + t_g · l_g).

    t_p → mean seconds of an iteration that computes prompts; t_g → of one that computes decodes beside them; both
    moving averages of what is measured here; l_g → predicted output tokens. A client's own SLO goes first: a
    deadline, or the first token's time plus the others' times the predicted length. Nothing measured yet: the averages
    count as zero.

    Differs from the paper: averages of the load at hand; and l_g is the prediction, the true length is not known.
    """

    def __init__(self, scale: float = _SCALE) -> None:
        self._scale = scale
        self.prompt_s = 0.0
        self.token_s = 0.0

    def observe(self, ran: Ran) -> None:
        """Iterations without prompts say nothing here."""
        if all(row.count == 1 for row in ran.plan.rows):
            return
        self.prompt_s = _mix(self.prompt_s, ran.latency_s)
        if any(row.count == 1 for row in ran.plan.rows):
            self.token_s = _mix(self.token_s, ran.latency_s)

    def of(self, sequence: Sequence) -> float:
        """Seconds on the worker's clock."""
        slo, length = sequence.request.slo, max(1.0, sequence.predicted)
        if slo.deadline_s:
            return sequence.arrived_s + slo.deadline_s
        if slo.ttft_s or slo.tpot_s:
            return sequence.arrived_s + (slo.ttft_s or self.prompt_s) + (slo.tpot_s or self.token_s) * length
        return sequence.arrived_s + self._scale * (self.prompt_s + self.token_s * length)


def _mix(old: float, new: float) -> float:
    return new if old == 0.0 else 0.95 * old + 0.05 * new
