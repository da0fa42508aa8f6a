"""The requests of one cell come out in the order in which they are due, whichever come and go."""

from __future__ import annotations

import random
from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.policies.bucketserve import length_index
from cohort.common.policies.bucketserve.length_index import DueList
from tests.examples import examples


def test_by_hand() -> None:
    waiting = DueList(5)
    assert [waiting.add(entry) for entry in (7, 3, 6)] == [False, True, False]
    assert list(waiting) == [3, 5, 6, 7]
    assert waiting.first == 3
    assert waiting.remove(5)
    assert waiting.remove(3)
    assert waiting.first == 6
    assert waiting.remove(7)
    assert not waiting.remove(6)


@mock.patch.object(length_index, "_RUN", 6)
@settings(max_examples=examples(0.6))
@given(seed=st.randoms(use_true_random=False), entries=st.sets(st.integers(-500, 500), min_size=1, max_size=400))
def test_against_a_sorted_list(seed: random.Random, entries: set[int]) -> None:
    arriving = sorted(entries)
    if seed.random() < 0.7:
        seed.shuffle(arriving)
    elif seed.random() < 0.5:
        arriving.reverse()
    waiting, here = DueList(arriving[0]), arriving[:1]
    left = True
    for entry in arriving[1:]:
        if left:
            assert waiting.add(entry) == (entry < min(here))
        else:
            waiting = DueList(entry)
        here.append(entry)
        left = True
        while here and seed.random() < 0.4:
            gone = min(here) if seed.random() < 0.5 else seed.choice(here)
            here.remove(gone)
            left = waiting.remove(gone)
            assert left == bool(here)
        assert list(waiting) == sorted(here)
        assert not here or waiting.first == min(here)
        assert all(0 < len(run) <= length_index._RUN for run in waiting._runs)


def test_a_change_moves_one_run_only() -> None:
    """However many wait, and whatever order they come in."""
    for order in (range(20_000), range(20_000, 0, -1)):
        waiting = DueList(order[0])
        for entry in order[1:]:
            waiting.add(entry)
        assert list(waiting) == sorted(order)
        assert max(len(run) for run in waiting._runs) <= length_index._RUN
        assert len(waiting._runs) <= 20_000 // (length_index._RUN // 2) + 1
