"""What a workload may hold, and which user asks next in a closed loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.errors import ConfigError
from cohort.common.workloads.items import ClosedLoopPart, ClosedLoopUsers, WorkItem, Workload

ITEM = WorkItem(1.0, 10, 5)


def test_rate_is_counted_by_gaps() -> None:
    items = tuple(replace(ITEM, arrival_s=at) for at in (1.0, 2.0, 5.0))
    assert (Workload("w", items).span_s, Workload("w", items).rate_per_s) == (4.0, 0.5)
    assert Workload("w", items[:1]).rate_per_s is None
    assert Workload("w", ()).rate_per_s is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_tokens": 0}, "w: item 1: prompt_tokens is 0"),
        ({"output_tokens": -3}, "w: item 1: output_tokens is -3"),
        ({"arrival_s": 0.5}, "w: item 1: arrival_s 0.5 is before 1.0"),
        ({"arrival_s": float("nan")}, "w: item 1: arrival_s is nan"),
        ({"hash_ids": (1,)}, "w: item 1: hash_ids without hash_block"),
    ],
)
def test_wrong_items_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Workload("w", (ITEM, replace(ITEM, **changes))).check()  # type: ignore[arg-type]


def test_a_closed_loop_needs_users_and_questions() -> None:
    for part in (ClosedLoopPart(0, (ITEM,)), ClosedLoopPart(2, ())):
        with pytest.raises(ConfigError, match="w: closed loop 0"):
            Workload("w", (), closed_loop=(part,)).check()


def part(concurrency: int, count: int, **changes: object) -> ClosedLoopPart:
    items = tuple(WorkItem(0.0, 1 + index, 1) for index in range(count))
    return ClosedLoopPart(concurrency, items, **changes)  # type: ignore[arg-type]


def prompts(items: list[WorkItem]) -> list[tuple[float, int]]:
    return [(item.arrival_s, item.prompt_tokens) for item in items]


def test_each_user_asks_again_when_answered() -> None:
    users = ClosedLoopUsers(part(2, 3))
    assert prompts(users.start(10.0)) == [(10.0, 1), (10.0, 2)]
    assert prompts(users.answered(11.0)) == [(11.0, 3)]
    assert users.answered(12.0) == users.answered(13.0) == []
    assert users.open_requests == 0
    with pytest.raises(ValueError, match="was not asked"):
        users.answered(14.0)


def test_in_batches_the_next_come_when_the_last_is_answered() -> None:
    users = ClosedLoopUsers(part(2, 5, in_batches=True))
    assert len(users.start(0.0)) == 2
    assert users.answered(1.0) == []
    assert prompts(users.answered(4.0)) == [(4.0, 3), (4.0, 4)]
    assert users.answered(5.0) == []
    assert prompts(users.answered(6.0)) == [(6.0, 5)]


def test_with_an_end_the_list_is_cycled_until_then() -> None:
    users = ClosedLoopUsers(part(1, 2, until_s=3.0))
    assert prompts(users.start(0.0)) == [(0.0, 1)]
    assert prompts(users.answered(1.0)) == [(1.0, 2)]
    assert prompts(users.answered(2.0)) == [(2.0, 1)]
    assert users.answered(3.0) == []


@given(
    concurrency=st.integers(1, 6), count=st.integers(1, 20), batches=st.booleans(), until=st.sampled_from([7.0, 1e9])
)
def test_never_more_open_than_users_and_every_question_once(
    concurrency: int, count: int, batches: bool, until: float
) -> None:
    cycling = until < 100
    users = ClosedLoopUsers(part(concurrency, count, in_batches=batches, until_s=until if cycling else float("inf")))
    asked = prompts(users.start(0.0))
    now = 0.0
    while users.open_requests:
        assert users.open_requests <= concurrency
        now += 0.5
        asked += prompts(users.answered(now))
    order = [prompt for _, prompt in asked]
    assert order == [1 + index % count for index in range(len(order))]
    assert all(at < until for at, _ in asked)
    if not cycling:
        assert len(order) == count
