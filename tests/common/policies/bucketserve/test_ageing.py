"""Urgency is one number fixed at arrival."""

from __future__ import annotations

from cohort.common.policies.bucketserve.length_index import due_s, entry_of
from tests.common.policies.bucketserve.cluster import waiting


def due(arrival_s: float, *, online: bool = True, priority: int = 0) -> float:
    request = waiting("r", arrival_s=arrival_s, online=online, priority=priority).request
    return due_s(request, priority_step_s=10.0, offline_delay_s=60.0)


def test_older_first_better_first_online_first() -> None:
    assert due(1.0) < due(2.0)
    assert due(5.0, priority=-1) < due(0.0)
    assert due(59.0) < due(0.0, online=False)


def test_age_overtakes_priority_and_class() -> None:
    assert due(0.0, priority=1) < due(10.5)
    assert due(0.0, online=False) < due(60.5)


def test_an_absurd_priority_buys_a_bounded_head_start() -> None:
    assert due(0.0, priority=-(10**9)) == -1000.0
    assert due(0.0, priority=10**9) == 1000.0


def test_one_number_sorts_as_the_pair_does() -> None:
    pairs = [(-1000.0, 9), (-0.5, 3), (0.0, 1), (0.0, 2), (1e-9, 1), (2.5, 7), (2.5, 2**40), (3e6, 4), (3e6 + 1e-8, 1)]
    assert sorted(pairs, key=lambda pair: entry_of(*pair)) == pairs
    assert len({entry_of(*pair) for pair in pairs}) == len(pairs)
