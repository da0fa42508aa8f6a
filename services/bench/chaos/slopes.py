"""The growth of a process's memory: a robust line through its life, with a confidence interval.

The life's first part is left out: pools fill, caches and heaps find their size. What is left is cut into equal bins,
each its median, and the line is Theil's and Sen's: the median of the slopes between all pairs of bins. The 95 %
interval is Sen's, from the distribution of Kendall's statistic (Sen, JASA 63, 1968, §4). Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import sqrt
from statistics import median

import msgspec

from cohort.services.bench.chaos.census import Sample

MEGABYTE = 1e6
_BIN_S = 30.0
_LEAST_BINS = 8
_Z = 1.959964


class Slope(msgspec.Struct, frozen=True):
    """Megabytes (1e6 bytes) an hour, with the ends of the 95 % interval; `over_s`: of how long a time."""

    mb_per_h: float
    low: float
    high: float
    over_s: float


def slope(samples: Sequence[Sample], skip_s: float, *, anonymous: bool = False) -> Slope | None:
    """Of a life without its first `skip_s` seconds; None where too little is left."""
    if not samples:
        return None
    begin_s = samples[0].at_s + skip_s
    bins: dict[int, list[float]] = {}
    for sample in samples:
        if sample.at_s >= begin_s:
            size = sample.anonymous_bytes if anonymous else sample.rss_bytes
            bins.setdefault(int((sample.at_s - begin_s) // _BIN_S), []).append(size)
    points = [((number + 0.5) * _BIN_S, median(sizes)) for number, sizes in sorted(bins.items())]
    if len(points) < _LEAST_BINS:
        return None
    middle, low, high = theil_sen(points)
    scale = 3600 / MEGABYTE
    return Slope(middle * scale, low * scale, high * scale, points[-1][0] - points[0][0] + _BIN_S)


def theil_sen(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """The slope of these (x, y) with different x, and the ends of its 95 % interval."""
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))
    count, number = len(points), len(slopes)
    spread = _Z * sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, int((number - spread) / 2))
    high = min(number - 1, int((number + spread) / 2) + 1)
    return median(slopes), slopes[low], slopes[high]
