"""When the decode step in flight will end, so that the next one is planned as late as it can be.

Asked by the worker loop. What arrives after the next step was planned waits for that step, too; a step that is planned
too late begins late. So the moment lies before the expected end by what planning takes and by how far steps stray.
"""

from __future__ import annotations

_LEAD_S = 0.0025
"""To plan a step, build its arrays and hand it to the engine thread, with the timer's own delay."""
_MEAN, _DEVIATION = 1 / 8, 1 / 4
"""Weights of the last step in the moving averages: those of TCP's round-trip estimate (RFC 6298)."""


def plan_after_s(foreseen_s: float) -> float:
    """The same moment for a step with prompts, which is to take about so long. No allowance for how far such steps
    stray, which is too far: one that ends before it is followed by a step that is decided."""
    return max(0.0, foreseen_s - _LEAD_S)


class DecodeTime:
    def __init__(self) -> None:
        self._mean_s = self._deviation_s = 0.0

    def note(self, latency_s: float) -> None:
        """A step of decode rows alone took so long."""
        if self._mean_s == 0.0:
            self._mean_s, self._deviation_s = latency_s, latency_s / 2
            return
        self._deviation_s += _DEVIATION * (abs(latency_s - self._mean_s) - self._deviation_s)
        self._mean_s += _MEAN * (latency_s - self._mean_s)

    @property
    def plan_after_s(self) -> float:
        """From a step's beginning until its successor is to be planned; 0 = at once, also while nothing is known."""
        return max(0.0, self._mean_s - 2 * self._deviation_s - _LEAD_S)
