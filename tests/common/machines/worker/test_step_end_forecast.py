"""The moment at which a step's successor is planned: late, and rarely too late."""

from __future__ import annotations

from random import Random

import pytest

from cohort.common.machines.worker.plan_ahead import StepEndForecast
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.step_times.learned_times import LearnedTimes, plan_shape
from cohort.common.sequence import Row
from tests.common.policies.baselines.drive import GEOMETRY, sequence

DECODE = IterationPlan(rows=[Row(sequence("r0", 8), 7, 1)])
PROMPT = IterationPlan(rows=[Row(sequence("r1", 64), 0, 64)])


def after_s(times: StepEndForecast) -> float:
    found = times.plan_after_s(DECODE, None)
    assert found is not None
    return found


def test_at_once_while_nothing_is_known_and_where_steps_are_short() -> None:
    times = StepEndForecast()
    assert after_s(times) == 0.0
    for _ in range(50):
        times.note(DECODE, 0.002)
    assert after_s(times) == 0.0


def test_shortly_before_the_end_of_steady_steps() -> None:
    times = StepEndForecast()
    for _ in range(100):
        times.note(DECODE, 0.020)
        times.note(PROMPT, 0.200)  # tells nothing of decodes
        times.note(IterationPlan(), 0.001)
    assert 0.016 < after_s(times) < 0.0185


@pytest.mark.parametrize("spread", [0.1, 0.3])
def test_the_more_steps_stray_the_earlier(spread: float) -> None:
    random, times, late, waited_s = Random(0), StepEndForecast(), 0, 0.0
    for step in range(1000):
        latency_s = 0.030 * random.uniform(1 - spread, 1 + spread)
        if step > 50:
            late += latency_s - after_s(times) < 0.001
            waited_s += after_s(times)
        times.note(DECODE, latency_s)
    assert late < 950 / 20
    assert waited_s / 950 > 0.030 * (1 - 2.2 * spread) - 0.004


def test_steps_that_become_longer_are_planned_later() -> None:
    times = StepEndForecast()
    for _ in range(30):
        times.note(DECODE, 0.010)
    before_s = after_s(times)
    for _ in range(60):
        times.note(DECODE, 0.040)
    assert after_s(times) > before_s + 0.02


def test_prompts_are_foreseen_by_what_was_learned() -> None:
    times, learned = StepEndForecast(), LearnedTimes()
    assert times.plan_after_s(PROMPT, None) is None and times.plan_after_s(PROMPT, learned) is None
    for tokens in range(16, 512, 16):
        learned.note(IterationPlan(rows=[Row(sequence("r2", tokens), 0, tokens)]), 0.001 * tokens, GEOMETRY)
    foreseen_s = learned.table.estimate(plan_shape(PROMPT))
    assert foreseen_s == pytest.approx(0.064, rel=0.1)
    assert times.plan_after_s(PROMPT, learned) == pytest.approx(foreseen_s - 0.0025)
