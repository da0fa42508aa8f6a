"""Searches the highest request rate that still meets the SLO: doubling up to the first failure, then bisection.

Pure: `modes.capacity` measures, this decides. Assumes that attainment falls with the rate; a single noisy point can
mislead it, so the report shows every point that was measured.

        start ──pass──▶ ×2 ──pass──▶ ×2 ──fail──▶ bisect (geometric mean) until high/low ≤ 1 + tolerance
          └──fail──▶ ÷2 ──fail──▶ ÷2 ──pass──▶ bisect …
"""

from __future__ import annotations

import math


class CapacitySearch:
    """`next_rate()` says what to measure, `observe()` takes the verdict; `next_rate()` None: the search is over."""

    def __init__(self, start_rate: float, max_rate: float, tolerance: float, min_rate: float = 1e-3) -> None:
        self._rate: float | None = min(start_rate, max_rate)
        self._max_rate = max_rate
        self._min_rate = min_rate
        self._tolerance = tolerance
        self._passed: float | None = None
        self._failed: float | None = None

    @property
    def best_rate(self) -> float | None:
        """The highest rate that passed so far; None if none did."""
        return self._passed

    @property
    def bounded_by_max_rate(self) -> bool:
        """The server kept up with the highest rate that may be tried: its capacity is at least that."""
        return self._passed is not None and self._passed >= self._max_rate

    def next_rate(self) -> float | None:
        return self._rate

    def observe(self, attained: bool) -> None:
        """The verdict on the rate that `next_rate` named."""
        if self._rate is None:
            raise ValueError("the search is over")
        if attained:
            self._passed = self._rate
        else:
            self._failed = self._rate
        self._rate = self._choose()

    def _choose(self) -> float | None:
        if self._failed is None:
            assert self._passed is not None
            return None if self._passed >= self._max_rate else min(self._passed * 2.0, self._max_rate)
        if self._passed is None:
            lower = self._failed / 2.0
            return lower if lower >= self._min_rate else None
        if self._failed / self._passed <= 1.0 + self._tolerance:
            return None
        return math.sqrt(self._passed * self._failed)
