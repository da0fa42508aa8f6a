"""The robust line through a life's memory, and its interval."""

from __future__ import annotations

from itertools import combinations
from random import Random
from statistics import median

import pytest

from cohort.services.bench.chaos.census import Sample
from cohort.services.bench.chaos.report import slope, theil_sen


def samples(mb_at: dict[float, float]) -> list[Sample]:
    return [Sample(at_s, round(mb * 1e6), 1, {}) for at_s, mb in mb_at.items()]


def test_the_line_is_the_median_of_all_pairs() -> None:
    random = Random(3)
    points = [(float(x), random.gauss(2 * x, 5)) for x in range(15)]
    by_hand = median((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))
    middle, low, high = theil_sen(points)
    assert middle == by_hand
    assert low < middle < high


def test_a_steady_growth_is_found_with_a_narrow_interval() -> None:
    found = slope(samples({float(t): 100 + t * 36 / 3600 for t in range(0, 1200, 5)}), skip_s=0)
    assert found is not None
    assert found.mb_per_h == pytest.approx(36, rel=0.01)
    assert found.low == pytest.approx(36, rel=0.01) and found.high == pytest.approx(36, rel=0.01)
    assert found.over_s == pytest.approx(1200)


def test_noise_around_a_level_has_zero_within_its_interval_and_an_outlier_does_not_move_it() -> None:
    random = Random(4)
    level = {float(t): 100 + random.gauss(0, 0.5) for t in range(0, 1200, 5)}
    level[600.0] = 900.0
    found = slope(samples(level), skip_s=0)
    assert found is not None and found.low < 0 < found.high
    assert abs(found.mb_per_h) < 2


def test_the_begin_of_a_life_is_left_out_and_a_short_life_has_no_slope() -> None:
    filling = {float(t): min(100.0, t / 3) for t in range(0, 900, 5)}
    found = slope(samples(filling), skip_s=310)
    assert found is not None and found.mb_per_h == 0
    assert slope(samples(filling), skip_s=700) is None
    assert slope([], skip_s=0) is None
