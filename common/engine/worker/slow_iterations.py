"""Notices iterations that take far longer than usual, for a warning on the live page: usually other programs have the
processors. Sampled at heartbeats, so that iterations cost nothing more. Called by `WorkerMetrics`; decides nothing.

What is usual begins as what was learned and follows slowly: within seconds the learned times are those of the slow
machine, and would call it usual.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import deque

from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.step_times.learned_times import LearnedTimes, plan_shape
from cohort.common.process.other_programs import OtherPrograms, pipeline_root

TOO_SLOW = 3.0
"""Ratio of measured to usual time from which a person is told."""
_CAUSE = 0.2
"""Share of the processors from which other programs are named as the cause."""
_SAMPLES, _LEAST = 12, 4
_FORGOTTEN_S = 10.0
_PROC_EVERY_S = 2.0
_FOLLOWS, _QUANTILE = 0.005, 0.3
"""Step, in logarithms, by which the usual time follows a sample, towards this quantile of them: in four minutes of
iterations by a factor of two in the slower direction, in two minutes in the faster one."""


class SlowIterations:
    def __init__(self, times: LearnedTimes | None, others: OtherPrograms | None = None) -> None:
        self.last: tuple[IterationPlan, float] | None = None
        """Iteration that ended last, and its seconds; None once it was sampled."""
        self._times = times
        self._others = others or OtherPrograms(pipeline_root())
        self._ratios: deque[float] = deque(maxlen=_SAMPLES)
        self._usual: dict[tuple[int, ...], float] = {}
        """Logarithm of the usual seconds of an iteration, by the octaves of its shape."""
        self._share: float | None = None
        self._sampled_s = self._looked_s = float("-inf")

    def warning(self, now_s: float | None = None) -> str:
        """Sample the last iteration; return a sentence while the median of the latest is `TOO_SLOW`, else ""."""
        now_s = time.monotonic() if now_s is None else now_s
        last, self.last = self.last, None
        if last is not None and (ratio := self._ratio(*last)):
            self._ratios.append(ratio)
            self._sampled_s = now_s
        elif now_s - self._sampled_s > _FORGOTTEN_S:
            self._ratios.clear()
        middle = statistics.median(self._ratios) if len(self._ratios) >= _LEAST else 0.0
        if middle < TOO_SLOW:
            self._share = None
            return ""
        if now_s - self._looked_s >= _PROC_EVERY_S:
            self._looked_s, self._share = now_s, self._others.share()
        cause = f": other programs take {self._share:.0%} of the processors" if (self._share or 0.0) >= _CAUSE else ""
        return f"iterations take {middle:.1f} times their usual time{cause}"

    def _ratio(self, plan: IterationPlan, latency_s: float) -> float:
        """Return measured over usual time; 0 if nothing was learned of such an iteration."""
        if self._times is None or plan.drafted or plan.has_grammars or plan.copies or not plan.rows:
            return 0.0
        shape = plan_shape(plan)
        learned_s = self._times.table.estimate(shape)
        if not learned_s:
            return 0.0
        octaves = tuple([count.bit_length() for count in shape])
        usual, measured = self._usual.get(octaves, math.log(learned_s)), math.log(max(latency_s, 1e-9))
        self._usual[octaves] = usual + _FOLLOWS * (_QUANTILE if measured > usual else _QUANTILE - 1.0)
        return math.exp(measured - usual)
