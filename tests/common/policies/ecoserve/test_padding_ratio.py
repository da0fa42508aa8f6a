"""The padding moves to where its cost is least, and only if asked to."""

from __future__ import annotations

import math
from random import Random

import pytest

from cohort.common.policies.ecoserve.padding_ratio import PaddingRatio


def test_a_step_up_for_too_little_a_third_of_it_down_for_too_much() -> None:
    padding = PaddingRatio(0.15, tuned=True, under_cost=3.0, step=0.01)
    padding.observe(100.0, 116, stopped=True)
    assert padding.ratio == pytest.approx(0.18)
    padding.observe(100.0, 118, stopped=False)
    assert padding.ratio == pytest.approx(0.17)
    assert (padding.under, padding.over) == (1, 1)
    padding.observe(100.0, 200, stopped=False)  # continued with the reserve: none waited
    assert padding.ratio == pytest.approx(0.17)
    assert (padding.under, padding.over) == (2, 1)


def test_fixed_it_only_counts() -> None:
    padding = PaddingRatio(0.15, tuned=False)
    padding.observe(10.0, 100, stopped=True)
    assert (padding.ratio, padding.under) == (0.15, 1)


def test_it_stays_within_bounds_however_wrong_the_predictor() -> None:
    padding = PaddingRatio(0.15, tuned=True)
    for _ in range(2000):
        padding.observe(1.0, 1000, stopped=True)
    assert padding.ratio == PaddingRatio.LARGEST
    for _ in range(2000):
        padding.observe(1000.0, 1, stopped=False)
    assert padding.ratio == 0.0


@pytest.mark.parametrize("sigma", [0.15, 0.35])
def test_where_every_request_stops_one_in_four_outlives_its_allocation_at_rest(sigma: float) -> None:
    random, padding = Random(1), PaddingRatio(0.15, tuned=True, under_cost=3.0)
    for _ in range(4000):
        tokens = round(1000 * math.exp(random.gauss(0, sigma)))
        padding.observe(1000.0, tokens, stopped=tokens > 1000 * (1 + padding.ratio))
    wanted = math.exp(0.674 * sigma) - 1.0  # the upper quartile of the error
    assert padding.ratio == pytest.approx(wanted, abs=0.06)
