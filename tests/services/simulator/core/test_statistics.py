from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.services.simulator.core.statistics import Histogram


def test_nothing_has_no_stats():
    assert Histogram().stats() is None


def test_by_hand():
    histogram = Histogram()
    for value in (0.1, 0.2, 0.3, 0.4):
        histogram.add(value)
    histogram.add(1.0, times=6)
    stats = histogram.stats()
    assert stats is not None
    assert (stats.count, stats.max) == (10, 1000.0)
    assert stats.mean == pytest.approx(700.0)
    assert stats.p50 == pytest.approx(1000.0, rel=0.01)


@given(st.lists(st.floats(1e-6, 1e5), min_size=1, max_size=60), st.sampled_from([0.1, 0.5, 0.9, 0.99]))
def test_quantiles_are_right_to_one_percent(values: list[float], share: float):
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = float(np.quantile(values, share, method="inverted_cdf"))
    assert histogram.quantile(share) == pytest.approx(exact, rel=0.0101)


@given(st.lists(st.floats(0, 100), max_size=30), st.lists(st.floats(0, 100), max_size=30))
def test_absorbing_is_adding(first: list[float], second: list[float]):
    one, other, both = Histogram(), Histogram(), Histogram()
    for value in first:
        one.add(value)
        both.add(value)
    for value in second:
        other.add(value)
        both.add(value)
    one.absorb(other)
    assert one.count == both.count
    assert [one.quantile(q) for q in (0.1, 0.5, 0.9)] == [both.quantile(q) for q in (0.1, 0.5, 0.9)]
