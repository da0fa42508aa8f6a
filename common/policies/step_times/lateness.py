"""How much longer than estimated iterations take, at the percentile that a bound on the time between tokens names."""

from __future__ import annotations

import math

_FIRST_STEP, _STEP = 0.1, 0.02
"""Change of the estimate, in logarithm, at a late iteration; at `percentile` 0.99 one in time lowers it by a hundredth
of that. The step shrinks from the first value to the second over the first `_YOUNG`."""
_YOUNG = 100
_MOST = math.log(2.0)
"""Max logarithm, half the bound: greater lateness has other reasons than the size of the iteration."""


class Lateness:
    """D5 · the `percentile` of measured over estimated time, tracked by stochastic approximation (Robbins and Monro).
    Differs from the paper: it estimates by what it measured on average and keeps the bound where iterations scatter
    little; on a machine whose cores other processes share half of them would come late."""

    def __init__(self, percentile: float) -> None:
        self._percentile = percentile
        self._log_ratio = 0.0
        self._recorded = 0

    def keep(self) -> tuple[float, int]:
        """Return the state for `resume`."""
        return self._log_ratio, self._recorded

    def resume(self, state: tuple[float, int]) -> None:
        """Go on from the state that an earlier process had `keep`. Raises `ValueError` for anything else."""
        log_ratio, recorded = state
        if not 0.0 <= log_ratio <= _MOST or recorded < 0:
            raise ValueError(f"no lateness: {state}")
        self._log_ratio, self._recorded = log_ratio, recorded

    @property
    def ratio(self) -> float:
        """Late time over estimate, at least 1."""
        return math.exp(self._log_ratio)

    def record(self, estimated_s: float, measured_s: float) -> None:
        """Record an iteration; one without an estimate is ignored."""
        if estimated_s <= 0.0 or measured_s <= 0.0:
            return
        beyond = math.log(measured_s / estimated_s) > self._log_ratio
        age = min(1.0, self._recorded / _YOUNG)
        step = _FIRST_STEP + age * (_STEP - _FIRST_STEP)
        self._recorded += 1
        self._log_ratio = min(max(self._log_ratio + step * (self._percentile - (not beyond)), 0.0), _MOST)
