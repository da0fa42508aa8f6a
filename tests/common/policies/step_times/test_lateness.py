"""The percentile of measured over estimated iteration times."""

from __future__ import annotations

import math
from random import Random

import pytest

from cohort.common.policies.step_times.lateness import Lateness


def test_one_late_iteration_weighs_as_much_as_many_in_time() -> None:
    lateness = Lateness(0.99)
    assert lateness.ratio == 1.0
    for _ in range(100):
        lateness.record(0.1, 0.1)
    assert lateness.ratio == 1.0
    lateness.record(0.1, 0.15)
    assert lateness.ratio == pytest.approx(math.exp(0.02 * 0.99))
    for _ in range(99):
        lateness.record(0.1, 0.1)
    assert lateness.ratio == pytest.approx(1.0)


def test_it_learns_faster_at_first() -> None:
    lateness = Lateness(0.99)
    lateness.record(0.1, 0.15)
    assert lateness.ratio == pytest.approx(math.exp(0.1 * 0.99))


def test_it_never_aims_beyond_the_bound_nor_below_half_of_it() -> None:
    lateness = Lateness(0.99)
    for _ in range(1000):
        lateness.record(0.1, 0.05)
    assert lateness.ratio == 1.0
    for _ in range(1000):
        lateness.record(0.1, 5.0)
    assert lateness.ratio == pytest.approx(2.0)
    lateness.record(0.0, 5.0)  # nothing was estimated
    assert lateness.ratio == pytest.approx(2.0)


def test_it_finds_the_percentile_of_scattered_values() -> None:
    """Normal in logarithm with deviation 0.1: a twentieth lies beyond 1.645 deviations."""
    random, lateness, within = Random(3), Lateness(0.95), 0
    for number in range(20_000):
        measured_s = 0.1 * math.exp(random.gauss(0.0, 0.1))
        within += number >= 10_000 and measured_s <= 0.1 * lateness.ratio
        lateness.record(0.1, measured_s)
    assert within / 10_000 == pytest.approx(0.95, abs=0.02)


def test_learned_state_is_kept_and_goes_on_as_if_nothing_had_happened() -> None:
    lateness, resumed = Lateness(0.99), Lateness(0.99)
    for _ in range(1000):
        lateness.record(0.1, 0.13)
    resumed.resume(lateness.keep())
    assert resumed.ratio == pytest.approx(lateness.ratio) == pytest.approx(1.3, rel=0.03)
    before = resumed.ratio
    for each in (lateness, resumed):
        each.record(0.1, 1.0)
    assert resumed.ratio == pytest.approx(lateness.ratio) == pytest.approx(before * math.exp(0.02 * 0.99))


@pytest.mark.parametrize("kept", [(-0.1, 5), (0.8, 5), (math.nan, 5), (0.1, -1)])
def test_it_resumes_nothing_that_cannot_have_been_kept(kept: tuple[float, int]) -> None:
    with pytest.raises(ValueError, match="no lateness"):
        Lateness(0.99).resume(kept)
