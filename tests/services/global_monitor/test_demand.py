"""Arrival rate, forecast and mean lengths from counters that grow, jump and start anew."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.services.global_monitor.demand import Counters, Demand


def run(demand: Demand, rates: list[float], start_s: float = 0.0) -> None:
    demand.advance(start_s)
    for second, rate in enumerate(rates):
        demand.arrived(start_s + second + 0.5, rate, 100 * rate)
    demand.advance(start_s + len(rates))


def test_a_steady_rate_is_measured_and_forecast() -> None:
    demand = Demand()
    run(demand, [5.0] * 60)
    assert demand.rate == pytest.approx(5.0)
    assert demand.forecast() == pytest.approx(5.0, abs=0.01)
    assert demand.mean_prompt_tokens == pytest.approx(100.0)


def test_a_rising_rate_is_forecast_above_a_falling_one_below() -> None:
    rising, falling = Demand(), Demand()
    run(rising, [float(second) for second in range(40)])
    run(falling, [float(40 - second) for second in range(40)])
    assert rising.forecast() > 39.0 - 2.0 > rising.rate
    assert falling.forecast() < 1.0 + 2.0 < falling.rate


def test_silence_brings_the_rate_to_zero_and_leaves_the_means() -> None:
    demand = Demand()
    run(demand, [5.0] * 30)
    demand.finished(30.5, 10, 2000)
    demand.advance(7200.0)
    assert demand.rate < 0.01
    assert demand.forecast() < 0.01
    assert (demand.mean_prompt_tokens, demand.mean_output_tokens) == pytest.approx((100.0, 200.0))


def test_the_first_seconds_are_not_taken_for_silence() -> None:
    demand = Demand()
    run(demand, [8.0, 8.0, 8.0])
    assert demand.rate == pytest.approx(8.0)


def test_means_follow_the_workload() -> None:
    demand = Demand()
    for second in range(300):
        demand.finished(float(second), 1, 100)
    for second in range(300, 600):
        demand.finished(float(second), 1, 900)
    assert demand.mean_output_tokens > 850


@given(st.lists(st.floats(0, 1e6), max_size=50), st.floats(0, 1e6))
def test_rate_and_forecast_are_never_negative(rates: list[float], start_s: float) -> None:
    demand = Demand()
    run(demand, rates, start_s)
    assert demand.rate >= 0
    assert demand.forecast() >= 0


def test_counters_give_increases() -> None:
    counters = Counters()
    assert counters.increase(1, {"n": 100.0}, "n") == 0.0  # counted before we came
    assert counters.increase(1, {"n": 103.0}, "n") == 3.0
    assert counters.increase(1, {"n": 103.0}, "n") == 0.0
    assert counters.increase(1, {}, "other") == 0.0


def test_a_restarted_process_counts_from_zero() -> None:
    counters = Counters()
    counters.increase(1, {"n": 100.0}, "n")
    assert counters.increase(2, {"n": 4.0}, "n") == 4.0
    assert counters.increase(2, {"n": 2.0}, "n") == 0.0  # a counter never falls; whatever this is, it is no arrival
