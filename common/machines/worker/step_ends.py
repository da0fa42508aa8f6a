"""When the step in flight will end, so that the next one is planned as late as it can be.

Asked by the worker loop, and by the simulator's engine where it runs iterations one by one. What arrives after the next
step was planned waits for that step, too; a step that is planned too late begins late. So the moment lies before the
expected end by what planning takes and by how far steps stray.
"""

from __future__ import annotations

from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.step_times.learned_times import LearnedTimes, plan_shape

_LEAD_S = 0.0025
"""To plan a step, build its arrays and hand it to the engine thread, with the timer's own delay."""
_MEAN, _DEVIATION = 1 / 8, 1 / 4
"""Weights of the last step in the moving averages: those of TCP's round-trip estimate (RFC 6298)."""


class StepEnds:
    """Of decode steps by the last ones, of steps with prompts by what the worker has learned of such."""

    def __init__(self) -> None:
        self._mean_s = self._deviation_s = 0.0

    def note(self, plan: IterationPlan, latency_s: float) -> None:
        """It took so long. Only steps of decode rows alone are told from others by it."""
        if not plan.rows or not _decodes(plan):
            return
        if self._mean_s == 0.0:
            self._mean_s, self._deviation_s = latency_s, latency_s / 2
            return
        self._deviation_s += _DEVIATION * (abs(latency_s - self._mean_s) - self._deviation_s)
        self._mean_s += _MEAN * (latency_s - self._mean_s)

    def plan_after_s(self, plan: IterationPlan, times: LearnedTimes | None) -> float | None:
        """From this step's beginning until its successor is to be planned; 0 = at once, also while nothing is known of
        decodes. None: when a step with prompts will end is not foreseen. No allowance for how far such steps stray,
        which is too far: one that ends before it is followed by a step that is decided."""
        if _decodes(plan):
            return max(0.0, self._mean_s - 2 * self._deviation_s - _LEAD_S)
        foreseen_s = None if times is None else times.table.estimate(plan_shape(plan))
        return None if foreseen_s is None else max(0.0, foreseen_s - _LEAD_S)


def _decodes(plan: IterationPlan) -> bool:
    return all([row.count == 1 for row in plan.rows])
