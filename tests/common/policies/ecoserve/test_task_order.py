"""E6 by hand, changes of range as time goes on, and brute force over random queues."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from cohort.common.policies.ecoserve.task_order import PromptQueue, Ranges, rank
from cohort.common.sequence import Sequence
from tests.common.policies.baselines.drive import sequence

RANGES = Ranges((0.5, 2.0), 2.0, 128)


def task(name: str, prompt: int = 4, computed: int = 0, priority: int = 0, arrived_s: float = 0.0) -> Sequence:
    made = sequence(name, prompt, priority=priority, arrived_s=arrived_s)
    made.computed = computed
    return made


def test_deadline_range_then_occupied_kv_then_length() -> None:
    tasks = [
        (task("soon", computed=10), 0.4, 50),
        (task("later, much KV", computed=300), 1.0, 10),
        (task("later, longer", computed=20), 1.9, 300),
        (task("later, shorter", computed=100), 0.6, 200),
        (task("far", computed=900), 9.0, 900),
        (task("urgent by its client", priority=-1), 99.0, 1),
    ]
    ordered = sorted(tasks, key=lambda item: rank(RANGES, 0.0, item[1], item[0], item[2]))
    assert [item[0].request_id for item in ordered] == [
        "urgent by its client",
        "soon",
        "later, much KV",
        "later, longer",
        "later, shorter",
        "far",
    ]


def test_the_longest_overdue_come_first() -> None:
    assert RANGES.urgency(10.0, 3.0) < RANGES.urgency(10.0, 9.0) < RANGES.urgency(10.0, 10.2)
    assert RANGES.changes_s(10.0, 9.0) is None
    assert RANGES.changes_s(10.0, 20.0) == 18.0
    assert RANGES.changes_s(19.0, 20.0) == 19.5
    assert RANGES.changes_s(19.9, 20.0) == 20.0


def test_best_fit_by_bisection_first_class_first() -> None:
    queue = PromptQueue(RANGES, ordered=True)
    soon, soon_long, far = task("soon", 40), task("soon long", 90), task("far", 60)
    for made, deadline_s in ((soon, 0.3), (soon_long, 0.4), (far, 50.0)):
        queue.add(0.0, made, deadline_s)
    assert queue.fitting(100) is soon_long
    assert queue.fitting(89) is soon
    assert queue.fitting(39) is None
    queue.remove(soon)
    assert queue.fitting(89) is far


def test_a_prompt_moves_up_when_its_time_comes() -> None:
    queue = PromptQueue(RANGES, ordered=True)
    small, big = task("small", 3), task("big", 30)
    queue.add(0.0, small, 2.4)
    queue.add(0.0, big, 100.0)
    queue.refresh(1.0)
    assert queue.head() == (small, 2.4)
    queue.refresh(99.8)
    assert queue.head() == (small, 2.4)
    assert queue.fitting(30) is small  # overdue: its class is the first
    queue.remove(small)
    assert queue.head() == (big, 100.0)
    assert len(queue) == 1


def test_first_come_first_served_searches_nothing() -> None:
    queue = PromptQueue(RANGES, ordered=False)
    queue.add(0.0, task("late", 3, arrived_s=2.0), 0.1)
    queue.add(0.0, task("early", 30, arrived_s=1.0), 99.0)
    assert queue.fitting(10) is None
    found = queue.fitting(30)
    assert found is not None and found.request_id == "early"


@given(
    tasks=st.lists(st.tuples(st.integers(1, 60), st.floats(0, 8), st.integers(0, 1)), min_size=1, max_size=25),
    now_s=st.floats(0, 10),
    tokens=st.integers(0, 70),
    gone=st.sets(st.integers(0, 24)),
)
@example([(7, 0.6, 1)], 0.1, 54, set()).via("0.6 - 0.1 is 0.5, yet 0.6 - 0.5 comes before 0.1: refresh had no end")
def test_against_sorting(tasks: list[tuple[int, float, int]], now_s: float, tokens: int, gone: set[int]) -> None:
    queue = PromptQueue(RANGES, ordered=True)
    made = [(task(f"t{i}", p, priority=pr, arrived_s=float(i)), d) for i, (p, d, pr) in enumerate(tasks)]
    for each, deadline_s in made:
        queue.add(0.0, each, deadline_s)
    for index in sorted(gone):
        if index < len(made):
            assert queue.remove(made[index][0])
            assert not queue.remove(made[index][0])
    queue.refresh(now_s)
    left = [pair for index, pair in enumerate(made) if index not in gone]
    left.sort(key=lambda pair: rank(RANGES, now_s, pair[1], pair[0], pair[0].target))
    assert len(queue) == len(left)
    head = queue.head()
    assert (head[0] if head else None) is (left[0][0] if left else None)
    expected = next((each for each, _ in left if each.target <= tokens), None)
    assert queue.fitting(tokens) is expected
