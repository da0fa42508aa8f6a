"""The moment at which a step's successor is planned: late, and rarely too late."""

from __future__ import annotations

from random import Random

import pytest

from cohort.common.engine.decode_time import DecodeTime


def test_at_once_while_nothing_is_known_and_where_steps_are_short() -> None:
    times = DecodeTime()
    assert times.plan_after_s == 0.0
    for _ in range(50):
        times.note(0.002)
    assert times.plan_after_s == 0.0


def test_shortly_before_the_end_of_steady_steps() -> None:
    times = DecodeTime()
    for _ in range(100):
        times.note(0.020)
    assert 0.016 < times.plan_after_s < 0.0185


@pytest.mark.parametrize("spread", [0.1, 0.3])
def test_the_more_steps_stray_the_earlier(spread: float) -> None:
    random, times, late, waited_s = Random(0), DecodeTime(), 0, 0.0
    for step in range(1000):
        latency_s = 0.030 * random.uniform(1 - spread, 1 + spread)
        if step > 50:
            late += latency_s - times.plan_after_s < 0.001
            waited_s += times.plan_after_s
        times.note(latency_s)
    assert late < 950 / 20
    assert waited_s / 950 > 0.030 * (1 - 2.2 * spread) - 0.004


def test_steps_that_become_longer_are_planned_later() -> None:
    times = DecodeTime()
    for _ in range(30):
        times.note(0.010)
    before_s = times.plan_after_s
    for _ in range(60):
        times.note(0.040)
    assert times.plan_after_s > before_s + 0.02
