"""A warning while iterations take over three times their usual time, and no longer."""

from __future__ import annotations

from typing import Any, cast

import pytest

from cohort.common.engine.worker.slow_iterations import SlowIterations
from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.step_times.learned_times import LearnedTimes
from cohort.common.policies.step_times.step_cost import BatchShape

SHAPE = BatchShape.of_decodes(4, 900)


class Table:
    seconds = 0.01

    def estimate(self, shape: object) -> float | None:
        return self.seconds


class Times:
    table = Table()


class Others:
    shares: list[float | None]

    def share(self) -> float | None:
        return self.shares.pop(0) if len(self.shares) > 1 else self.shares[0]


class Plan:
    drafted = has_grammars = False
    copies: tuple[Any, ...] = ()
    rows = ("a row",)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowIterations:
    monkeypatch.setattr("cohort.common.engine.worker.slow_iterations.plan_shape", lambda plan: SHAPE)
    others = Others()
    others.shares = [None, 0.61]
    return SlowIterations(cast(LearnedTimes, Times()), cast(Any, others))


def run(slow: SlowIterations, since_s: float, *seconds: float, **fields: Any) -> list[str]:
    said = []
    for n, each in enumerate(seconds):
        plan = Plan()
        vars(plan).update(fields)
        slow.last = (cast(IterationPlan, plan), each)
        said.append(slow.warning(since_s + n))
    return said


def test_it_warns_with_the_cause_and_stops(slow: SlowIterations) -> None:
    assert run(slow, 0.0, *[0.02] * 12) == [""] * 12, "twice as long is no news"
    said = run(slow, 20.0, *[0.045] * 12)
    assert said[0] == "" and "iterations take 4.4 times their usual time" in said
    assert said[-1] == "iterations take 4.4 times their usual time: other programs take 61% of the processors"
    assert run(slow, 40.0, *[0.01] * 8)[-1] == ""


def test_learned_times_that_follow_the_slow_machine_do_not_end_the_warning(
    slow: SlowIterations, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(slow, 0.0, *[0.01] * 8)
    monkeypatch.setattr(Table, "seconds", 0.06)
    assert all(run(slow, 10.0, *[0.06] * 60)[12:]), "half a minute of heartbeats"
    assert run(slow, 100.0, *[0.06] * 700)[-1] == "", "by now it is usual"
    assert run(slow, 900.0, *[0.01] * 300)[-1] == ""
    assert run(slow, 1300.0, *[0.05] * 12)[-1], "and no longer"


def test_what_says_nothing_of_the_machine_is_left_out(slow: SlowIterations) -> None:
    for field in ("drafted", "has_grammars", "copies"):
        assert run(slow, 0.0, *[9.0] * 9, **{field: True}) == [""] * 9


def test_it_forgets_when_nothing_runs(slow: SlowIterations) -> None:
    assert run(slow, 0.0, *[0.09] * 5)[-1]
    assert slow.warning(6.0)
    assert slow.warning(20.0) == ""


def test_without_learned_times_nothing_is_said() -> None:
    slow = SlowIterations(None)
    slow.last = (cast(IterationPlan, Plan()), 9.0)
    assert slow.warning(0.0) == ""
