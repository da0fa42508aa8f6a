"""As many prompts in time as can be, against every subset; and the shortest first as far as none is late for it."""

from __future__ import annotations

from itertools import combinations, permutations

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.cohort.feasible_set import cheapest_in_time, most_in_time

Job = tuple[float, float]
JOBS = st.lists(st.tuples(st.integers(0, 24).map(float), st.integers(1, 9).map(float)), max_size=6)


def in_time(jobs: list[Job], start_s: float) -> bool:
    for due_s, work_s in jobs:
        start_s += work_s
        if start_s > due_s:
            return False
    return True


def waits(jobs: list[Job]) -> float:
    at_s = total_s = 0.0
    for _, work_s in jobs:
        at_s += work_s
        total_s += at_s
    return total_s


@given(JOBS, st.integers(0, 3).map(float))
def test_no_other_choice_keeps_more_and_no_other_order_is_shorter(jobs: list[Job], start_s: float) -> None:
    kept, left_out = most_in_time(jobs, start_s)
    assert sorted(kept + left_out) == list(range(len(jobs)))
    chosen = [jobs[index] for index in kept]
    assert in_time(chosen, start_s)
    for size in range(len(kept) + 1, len(jobs) + 1):
        assert not any(in_time(sorted(some), start_s) for some in combinations(jobs, size))
    orders = [list(order) for order in permutations(chosen) if in_time(list(order), start_s)]
    assert waits(chosen) == min(waits(order) for order in orders)


def test_the_shortest_first_where_all_are_in_time() -> None:
    assert most_in_time([(90.0, 30.0), (100.0, 5.0), (110.0, 10.0)], 0.0) == ([1, 2, 0], [])


def test_an_urgent_long_one_before_a_short_one_that_can_wait() -> None:
    assert most_in_time([(32.0, 30.0), (100.0, 5.0)], 0.0) == ([0, 1], [])


def test_the_longest_is_left_out_for_two_shorter_ones() -> None:
    assert most_in_time([(30.0, 30.0), (31.0, 15.0), (32.0, 16.0)], 0.0) == ([1, 2], [0])


@given(JOBS, st.integers(1, 5).map(float), st.integers(0, 3).map(float))
def test_of_jobs_alike_as_many_as_can_be_and_no_other_such_set_is_cheaper(
    jobs: list[Job], each_s: float, start_s: float
) -> None:
    kept, left_out = cheapest_in_time(jobs, each_s, start_s)
    assert sorted(kept + left_out) == list(range(len(jobs)))
    assert in_time([(jobs[index][0], each_s) for index in kept], start_s)
    costs = [
        sum(cost for _, cost in some)
        for some in combinations(jobs, len(kept))
        if in_time([(due_s, each_s) for due_s, _ in sorted(some)], start_s)
    ]
    assert sum(jobs[index][1] for index in kept) == min(costs)
    for some in combinations(jobs, len(kept) + 1):
        assert not in_time([(due_s, each_s) for due_s, _ in sorted(some)], start_s)
    assert [jobs[index][1] for index in left_out] == sorted(jobs[index][1] for index in left_out)
