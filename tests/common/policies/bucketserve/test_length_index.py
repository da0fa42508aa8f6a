"""The segment tree over lengths answers like a walk over all entries."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.errors import InvariantViolated
from cohort.common.policies.bucketserve.length_index import LengthIndex


def test_by_hand() -> None:
    index = LengthIndex(8)
    for cell, entry in ((5, (3.0, 1)), (2, (9.0, 2)), (5, (1.0, 3)), (7, (2.0, 4))):
        index.add(cell, entry)
    assert index.oldest == (1.0, 3)
    assert index.count(0, 8) == 4
    assert index.count(3, 7) == 2
    assert index.first_due(0, 5) == (9.0, 2)
    assert index.shortest(3, 8) == (1.0, 3)
    assert index.longest(0, 8) == (2.0, 4)
    assert index.first_due(3, 5) is None
    index.remove(5, (1.0, 3))
    assert index.oldest == (2.0, 4)
    assert index.shortest(3, 8) == (3.0, 1)
    assert len(index) == 3


def test_check_notices_a_lost_entry() -> None:
    index = LengthIndex(4)
    index.add(1, (0.0, 1))
    index._heaps[1].clear()
    with pytest.raises(InvariantViolated):
        index.check()


@settings(max_examples=60, deadline=None)
@given(data=st.data(), cells=st.sampled_from([1, 2, 7, 20, 300]))
def test_against_brute_force(data: st.DataObject, cells: int) -> None:
    index = LengthIndex(cells)
    live: list[tuple[int, tuple[float, int]]] = []
    for serial in range(data.draw(st.integers(1, 60))):
        if live and data.draw(st.integers(0, 2)) == 0:
            cell, entry = live.pop(data.draw(st.integers(0, len(live) - 1)))
            index.remove(cell, entry)
        else:
            cell, entry = data.draw(st.integers(0, cells - 1)), (float(data.draw(st.integers(0, 9))), serial)
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


def test_cancelled_entries_do_not_pile_up() -> None:
    index = LengthIndex(2)
    index.add(0, (-1.0, 0))
    for serial in range(1, 1000):
        index.add(0, (float(serial), serial))
        index.remove(0, (float(serial), serial))
    assert len(index._heaps[0]) < 20
    assert len(index._dead) < 20
