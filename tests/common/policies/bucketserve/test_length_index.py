"""The segment tree over lengths answers like a walk over all entries."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.errors import InvariantViolated
from cohort.common.policies.bucketserve.length_index import LengthIndex
from tests.examples import examples


def test_by_hand() -> None:
    index = LengthIndex(8)
    for cell, entry in ((5, 31), (2, 92), (5, 13), (7, 24)):
        index.add(cell, entry)
    assert index.oldest == 13
    assert index.count(0, 8) == 4
    assert index.count(3, 7) == 2
    assert index.first_due(0, 5) == 92
    assert index.shortest(3, 8) == 13
    assert index.longest(0, 8) == 24
    assert index.first_due(3, 5) is None
    index.remove(5, 13)
    assert index.oldest == 24
    assert index.shortest(3, 8) == 31
    assert len(index) == 3


def test_check_notices_a_lost_entry() -> None:
    index = LengthIndex(4)
    index.add(1, 7)
    del index._waiting[1]
    with pytest.raises(InvariantViolated):
        index.check()


@settings(max_examples=examples(0.6))
@given(data=st.data(), cells=st.sampled_from([1, 2, 7, 20, 300]))
def test_against_brute_force(data: st.DataObject, cells: int) -> None:
    index = LengthIndex(cells)
    live: list[tuple[int, int]] = []
    for serial in range(data.draw(st.integers(1, 60))):
        if live and data.draw(st.integers(0, 2)) == 0:
            cell, entry = live.pop(data.draw(st.integers(0, len(live) - 1)))
            index.remove(cell, entry)
        else:
            cell, entry = data.draw(st.integers(0, cells - 1)), 100 * data.draw(st.integers(-5, 9)) + serial
            index.add(cell, entry)
            live.append((cell, entry))
    index.check()
    low = data.draw(st.integers(0, cells))
    high = data.draw(st.integers(low, cells))
    inside = [(cell, entry) for cell, entry in live if low <= cell < high]
    assert index.count(low, high) == len(inside)
    assert index.first_due(low, high) == min((entry for _, entry in inside), default=None)
    assert index.oldest == min((entry for _, entry in live), default=None)
    lowest = min((cell for cell, _ in inside), default=-1)
    highest = max((cell for cell, _ in inside), default=-1)
    assert index.shortest(low, high) == min((e for c, e in inside if c == lowest), default=None)
    assert index.longest(low, high) == min((e for c, e in inside if c == highest), default=None)


def test_nothing_is_left_of_removed_entries() -> None:
    index = LengthIndex(2)
    index.add(0, -1)
    for entry in range(1, 1000):
        index.add(0, entry)
        index.remove(0, entry)
    assert list(index._waiting[0]) == [-1]
    index.remove(0, -1)
    assert index._waiting == {}
    assert index.oldest is None
