"""Distributions that do not grow with what they have seen.

A logarithmic histogram: buckets 1 % wide, so a percentile is right to within 1 % of its value, whatever the range;
count, mean and extremes are exact. Used for every latency of the simulator.
"""

from __future__ import annotations

import math
from collections import defaultdict

import msgspec

_GROWTH = 1.01
_LOWEST = 1e-7
_SCALE = 1.0 / math.log(_GROWTH)


class Distribution(msgspec.Struct, frozen=True):
    """Milliseconds. `max` and `mean` are exact, percentiles right to within 1 %."""

    count: int
    mean: float
    p10: float
    p50: float
    p90: float
    p99: float
    max: float


class Histogram:
    """Seconds, none negative. Adding costs one logarithm at most."""

    __slots__ = ("_bucket", "_buckets", "_value_s", "count", "max_s", "sum_s")

    def __init__(self) -> None:
        self.count = 0
        self.sum_s = 0.0
        self.max_s = 0.0
        self._buckets: defaultdict[int, int] = defaultdict(int)
        self._value_s, self._bucket = math.nan, 0
        """The last value and its bucket: the rows of an iteration bring the same one many times in turn."""

    def add(self, value_s: float, times: int = 1) -> None:
        if value_s != self._value_s:
            self._value_s = value_s
            self._bucket = int(math.log(value_s / _LOWEST) * _SCALE) if value_s > _LOWEST else 0
            if value_s > self.max_s:
                self.max_s = value_s
        self._buckets[self._bucket] += times
        self.count += times
        self.sum_s += value_s * times

    def absorb(self, other: Histogram) -> None:
        for bucket, times in other._buckets.items():
            self._buckets[bucket] += times
        self.count += other.count
        self.sum_s += other.sum_s
        self.max_s = max(self.max_s, other.max_s)

    def quantile(self, share: float) -> float:
        """Return the time in seconds below which this share of the values lies; 0 without any."""
        wanted = share * self.count
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                middle = _LOWEST * _GROWTH ** (bucket + 0.5)
                return min(middle, self.max_s) if bucket else 0.0
        return 0.0

    def stats(self) -> Distribution | None:
        """Return the distribution, or None without values: a made-up zero would read as very fast."""
        if not self.count:
            return None
        p10, p50, p90, p99 = (self.quantile(share) * 1e3 for share in (0.1, 0.5, 0.9, 0.99))
        return Distribution(self.count, self.sum_s / self.count * 1e3, p10, p50, p90, p99, self.max_s * 1e3)
