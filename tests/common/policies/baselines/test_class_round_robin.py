"""BROS's round robin by hand: turns, what is skipped, which sequences queue for memory."""

from __future__ import annotations

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.baselines.class_round_robin import ClassRoundRobin
from tests.common.policies.baselines.drive import cache, leave, names, rows, sequence, step


def policy(rows: int = 4) -> ClassRoundRobin:
    return ClassRoundRobin(IterationLimits(rows, 16, 8, "recompute"))


def test_iterations_serve_the_classes_in_turn() -> None:
    robin, kv = policy(), cache(40)
    robin.add(0.0, sequence("rt", 4))
    robin.add(0.0, sequence("be", 12, traffic_class="be"))
    assert [rows(step(robin, kv)) for _ in range(5)] == [
        [("rt", 0, 4)],
        [("be", 0, 8)],
        [("rt", 4, 1)],
        [("be", 8, 4)],
        [("rt", 5, 1)],
    ]
    assert robin.metrics()["rt_iterations_total"] == 3.0


def test_a_class_with_nothing_to_run_leaves_its_turn() -> None:
    robin, kv = policy(), cache(40)
    be = sequence("be", 4, traffic_class="be")
    robin.add(0.0, be)
    assert [names(step(robin, kv)) for _ in range(2)] == [["be"], ["be"]]
    robin.add(0.0, sequence("rt", 4, arrived_s=1.0))
    assert [names(step(robin, kv)) for _ in range(3)] == [["rt"], ["be"], ["rt"]]
    leave(robin, kv, be)
    assert [names(step(robin, kv)) for _ in range(2)] == [["rt"], ["rt"]]


def test_a_request_without_blocks_is_not_overtaken_by_the_other_class() -> None:
    robin, kv = policy(), cache(5)
    first = sequence("first", 12, max_tokens=2, traffic_class="be")
    robin.add(0.0, first)
    step(robin, kv)
    step(robin, kv)
    robin.add(0.0, sequence("large", 12, arrived_s=1.0))
    robin.add(0.0, sequence("small", 2, arrived_s=2.0, traffic_class="be"))
    assert names(step(robin, kv)) == ["first"]
    leave(robin, kv, first)
    assert names(step(robin, kv)) == ["large"]
    assert names(step(robin, kv)) == ["small"]


def test_the_latest_of_either_class_gives_way() -> None:
    robin, kv = policy(), cache(4)
    robin.add(0.0, sequence("rt", 8))
    be = sequence("be", 8, arrived_s=1.0, traffic_class="be")
    robin.add(0.0, be)
    assert [names(step(robin, kv)) for _ in range(2)] == [["rt"], ["be"]]
    plan = step(robin, kv)  # a third block for `rt`
    assert (names(plan), [p.sequence for p in plan.preempted]) == (["rt"], [be])
