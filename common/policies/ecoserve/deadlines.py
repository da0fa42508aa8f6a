"""E9 · When a request should be complete: its SLO, or the time of an undisturbed run, times a scale.

Owned by `TimeSynced`, for ordering (E6) and the choice of borrowers (E7).
"""

from __future__ import annotations

from cohort.common.policies.step_times.profile_table import ProfileTable
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.sequence import Sequence
from cohort.common.types import StepTimes

_SCALE = 2.0
"""Scale of a request without an SLO: it is late after twice its undisturbed time."""
_RECENT = 0.01
"""Weight of a request in the moving means of lengths."""


class Deadlines:
    """E9 · EcoServe §4: SLO = scale · (t_p + t_g · l_g).

    t_p → seconds of an iteration of one prompt of mean length alone; t_g → of one decode at mean context; both by the
    learned times, so they are those of an undisturbed server. l_g → predicted output tokens. A client's own SLO goes
    first: a deadline, or the first token's time plus the others' times the predicted length. Times that are not
    learned yet count as zero. The paper measures the times beforehand with a data set; and l_g is the prediction here,
    because the true length is not known.
    """

    def __init__(self, table: ProfileTable, scale: float = _SCALE) -> None:
        """`table`: learned times of iterations, recorded by the scheduler."""
        self._table = table
        self._scale = scale
        self._prompt_tokens = self._context = self.prompt_s = self.token_s = 0.0
        self._of: StepTimes | None = None

    def meet(self, sequence: Sequence) -> None:
        """Add a new request's lengths to the means."""
        prompt = float(sequence.request.prompt_tokens)
        self._prompt_tokens = _mix(self._prompt_tokens, prompt)
        self._context = _mix(self._context, prompt + 0.5 * max(1.0, sequence.predicted))
        self._price()

    def refresh(self) -> None:
        """Update the times after iterations were recorded."""
        if self._table.step_times is not self._of:
            self._price()

    def of(self, sequence: Sequence) -> float:
        """Return the request's deadline on the worker's clock."""
        slo, length = sequence.request.slo, max(1.0, sequence.predicted)
        if slo.deadline_s:
            return sequence.arrived_s + slo.deadline_s
        if slo.ttft_s or slo.tpot_s:
            return sequence.arrived_s + (slo.ttft_s or self.prompt_s) + (slo.tpot_s or self.token_s) * length
        return sequence.arrived_s + self._scale * (self.prompt_s + self.token_s * length)

    def _price(self) -> None:
        self._of = times = self._table.step_times
        if times is None:
            return
        prompt, context = max(1, round(self._prompt_tokens)), max(1, round(self._context))
        self.prompt_s = step_seconds(times, BatchShape(prompt, 1, prompt * (prompt + 1) // 2, 0, 0))
        self.token_s = step_seconds(times, BatchShape.of_decodes(1, context))


def _mix(old: float, new: float) -> float:
    return new if old == 0.0 else (1.0 - _RECENT) * old + _RECENT * new
