"""The dynamic programme against every possible choice of bounds."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies.bucketserve.optimal_split import optimal_bounds
from cohort.common.policies.bucketserve.waste import expected_waste
from tests.examples import examples


def test_two_lengths_two_buckets_waste_next_to_nothing() -> None:
    lengths, weights = np.array([9.0, 99.0]), np.array([5.0, 5.0])
    assert optimal_bounds(range(1, 101), lengths, weights, 2) == [10, 100]
    assert expected_waste([10, 100], lengths, weights) == pytest.approx((0.1 + 0.01) / 2)


def test_one_bucket_is_the_whole_range_and_more_than_needed_are_not_used() -> None:
    lengths, weights = np.array([9.0]), np.array([5.0])
    assert optimal_bounds([50, 100], lengths, weights, 1) == [100]
    assert optimal_bounds([10, 50, 100], lengths, weights, 3) == [10, 100]


@settings(max_examples=examples(0.6))
@given(
    histogram=st.dictionaries(st.integers(0, 45), st.integers(1, 9), min_size=1, max_size=12),
    candidates=st.sets(st.integers(1, 39), min_size=1, max_size=8),
    buckets=st.integers(1, 4),
)
def test_no_choice_of_bounds_wastes_less(histogram: dict[int, int], candidates: set[int], buckets: int) -> None:
    bounds = [*sorted(candidates), 40]
    lengths, weights = np.array(list(histogram), float), np.array(list(histogram.values()), float)
    found = optimal_bounds(bounds, lengths, weights, buckets)
    best = min(
        expected_waste([*inner, 40], lengths, weights)
        for size in range(min(buckets, len(bounds)))
        for inner in combinations(bounds[:-1], size)
    )
    assert found[-1] == 40
    assert len(found) <= buckets
    assert expected_waste(found, lengths, weights) == pytest.approx(best)
