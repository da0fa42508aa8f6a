"""Processor time that simulations may take: a share of one core, measured in CPU seconds over wall seconds.

Credit grows with time and is spent by rounds. What a quiet time saves is there when the load rises, which is when
rounds are large and late ones cost most; it is bounded, and begins full, because a pipeline that has just started knows
least.
"""

from __future__ import annotations

SAVED_S = 1800.0
"""Wall time whose share can be saved up."""


class Budget:
    def __init__(self, share: float, now_s: float) -> None:
        self._share = share
        self._credit_s = share * SAVED_S
        self._last_s = now_s
        self._round_s = 0.0
        self.spent_s = 0.0

    def affords(self, now_s: float) -> bool:
        """Another round of what the last ones took."""
        self._credit_s = min(self._share * SAVED_S, self._credit_s + self._share * max(0.0, now_s - self._last_s))
        self._last_s = now_s
        return self._credit_s > 0.0 and self._credit_s >= min(self._round_s, self._share * SAVED_S)

    def spend(self, cpu_s: float) -> None:
        self._credit_s -= cpu_s
        self.spent_s += cpu_s
        self._round_s = cpu_s if not self._round_s else 0.5 * (self._round_s + cpu_s)
