"""Running by forecast, by hand: one iteration after the other over a small cache."""

from __future__ import annotations

from typing import Any

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.ecoserve.by_forecast import ByForecast
from cohort.common.sequence import Phase, Sequence
from tests.common.policies.baselines.drive import leave, rows, sequence, step
from tests.common.policies.ecoserve.drive import nested, options


def scheduler(**given: Any) -> ByForecast:
    return ByForecast(options(**given), IterationLimits(16, 32, 32, "swap"))


def sequence_of(name: str, prompt: int, predicted: float, **more: Any) -> Sequence:
    return sequence(name, prompt, predicted=predicted, max_tokens=100, **more)


def test_no_sequence_holds_unused_blocks_and_the_next_starts_in_time() -> None:
    """Blocks of 4. a: 8 + 8 positions, 4 blocks at its end. b: 4 + 16, which is 3 blocks then, 5 when a is gone: with 7
    both run at once, with 6 b starts when its last positions and a's no longer meet."""
    policy, kv = scheduler(), nested(7)
    a, b = sequence_of("a", 8, 9), sequence_of("b", 4, 17)
    policy.add(0.0, a)
    policy.add(0.0, b)
    assert rows(step(policy, kv)) == [("a", 0, 8), ("b", 0, 4)]
    step(policy, kv)
    assert kv.owners() == {a.key: 3, b.key: 2}  # as far as they are, not 4 and 5
    for _ in range(7):
        plan = step(policy, kv)
        assert len(plan.rows) == 2 and not plan.preempted
    leave(policy, kv, a)
    for _ in range(8):
        assert rows(step(policy, kv)) == [("b", b.computed - 1, 1)]
    assert kv.owners() == {b.key: 5}

    policy, kv = scheduler(), nested(6)
    policy.add(0.0, sequence_of("a", 8, 9))
    policy.add(0.0, sequence_of("b", 4, 17))
    assert rows(step(policy, kv)) == [("a", 0, 8)]


def test_an_end_lets_the_next_prompt_in() -> None:
    policy, kv = scheduler(), nested(5)
    a, b = sequence_of("a", 8, 9), sequence_of("b", 8, 9)
    policy.add(0.0, a)
    policy.add(0.0, b)
    for _ in range(3):
        assert [name for name, _, _ in rows(step(policy, kv))] == ["a"]
    leave(policy, kv, a)
    assert rows(step(policy, kv)) == [("b", 0, 8)]


def test_a_forecast_that_was_wrong_costs_the_loosest_its_place_and_it_returns() -> None:
    """Both are predicted to end after 4 more tokens, and neither does; the cache holds the growth of one."""
    policy, kv = scheduler(reserve=0.0), nested(7, 8)
    a, b = sequence_of("a", 8, 5, arrived_s=0.0), sequence_of("b", 8, 5, arrived_s=1.0)
    policy.add(0.0, a)
    policy.add(0.0, b)
    for _ in range(20):
        plan = step(policy, kv)
        kv.check()
        if plan.preempted or policy.metrics()["underpredictions_stopped_total"]:
            break
    assert policy.metrics()["underpredictions_stopped_total"] + policy.metrics()["borrowers_late_total"] > 0
    runs = next(iter(plan.rows)).sequence
    other = b if runs is a else a
    leave(policy, kv, runs)
    for _ in range(3):
        plan = step(policy, kv)
    assert [row.sequence for row in plan.rows] == [other]
    assert other.phase is Phase.RUNNING
