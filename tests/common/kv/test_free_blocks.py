"""Free blocks: best fit and joining by hand, then random histories against a set of ids."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.kv.free_blocks import FreeBlocks


def test_the_smallest_extent_that_holds_all_is_used() -> None:
    free = FreeBlocks(20)
    assert free.take(20) == list(range(20))
    free.add([0, 1, 2, 3, 4, 10, 11, 12, 18])  # extents of 5, 3 and 1
    assert free.extents == 3
    assert free.take(1) == [18]
    assert free.take(2) == [10, 11]
    assert free.take(4) == [0, 1, 2, 3]
    assert sorted(free) == [4, 12]


def test_neighbours_that_become_free_join_on_both_sides() -> None:
    free = FreeBlocks(10)
    free.take(10)
    free.add([2, 3])
    free.add([7, 6])
    free.add([5, 4])
    assert (free.extents, free.count) == (1, 6)
    assert free.take(6) == [2, 3, 4, 5, 6, 7]


def test_a_count_beyond_any_extent_comes_from_the_longest_ones() -> None:
    free = FreeBlocks(12)
    free.take(12)
    free.add([0, 2, 3, 6, 7, 8])
    assert free.take(5) == [2, 3, 6, 7, 8]


def extents(ids: set[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for block in sorted(ids):
        if found and found[-1][1] == block:
            found[-1] = found[-1][0], block + 1
        else:
            found.append((block, block + 1))
    return found


@given(st.integers(1, 24), st.lists(st.tuples(st.booleans(), st.integers(0, 10**6)), max_size=60))
def test_any_history_keeps_the_ids_and_breaks_up_no_more_than_it_must(
    total: int, steps: list[tuple[bool, int]]
) -> None:
    free, model, owned = FreeBlocks(total), set(range(total)), set[int]()
    for takes, number in steps:
        if takes:
            count = number % (len(model) + 1)
            before = extents(model)
            taken = free.take(count)
            assert taken == sorted(set(taken)) and len(taken) == count and set(taken) <= model
            fitting = [end - start for start, end in before if end - start >= count]
            if count and fitting:
                assert all(b == a + 1 for a, b in pairwise(taken))
                home = next(end - start for start, end in before if start <= taken[0] < end)
                assert home == min(fitting)
            model -= set(taken)
            owned |= set(taken)
        elif owned:
            some = sorted(owned)[: 1 + number % len(owned)] if number % 2 else sorted(owned)[:: 1 + number % 3]
            free.add(some)
            model |= set(some)
            owned -= set(some)
        assert set(free) == model and free.count == len(model)
        assert free.extents == len(extents(model))
