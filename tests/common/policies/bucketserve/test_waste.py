"""Eq. 2 and Eq. 3 on cases computed by hand."""

from __future__ import annotations

import numpy as np
import pytest

from cohort.common.policies.bucketserve.waste import expected_waste, waste_ratio


def test_equation_2_by_hand() -> None:
    # S_max 100, S_avg 60 → 0.4
    assert waste_ratio([20, 60, 100]) == pytest.approx(0.4)
    assert waste_ratio([7]) == 0.0
    assert waste_ratio([]) == 0.0
    assert waste_ratio([0, 0]) == 0.0


def test_equation_3_by_hand() -> None:
    lengths, weights = np.array([10.0, 50.0, 90.0]), np.array([2.0, 1.0, 1.0])
    # One bucket to 100: (2·0.9 + 0.5 + 0.1) / 4
    assert expected_waste([100], lengths, weights) == pytest.approx(0.6)
    # Two, [0, 20) and [20, 100): (2·0.5 + 0.5 + 0.1) / 4
    assert expected_waste([20, 100], lengths, weights) == pytest.approx(0.4)


def test_a_bound_is_exclusive_and_the_last_bucket_takes_longer_requests() -> None:
    one = np.array([1.0])
    assert expected_waste([10, 20], np.array([10.0]), one) == pytest.approx(0.5)
    assert expected_waste([10, 20], np.array([35.0]), one) == 0.0
    assert expected_waste([10], np.array([]), np.array([])) == 0.0
