"""The wait for blocks against iterations played one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.cohort.block_wait import BlockWait

ROWS = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), max_size=12)


def most_held_from(rows: list[tuple[int, int]], start: int) -> int:
    """The most positions that are held at any iteration from this one on; a row grows by one in each until it ends, and
    the half block that it has begun is held as well."""
    last = max((left for left, _ in rows), default=0)
    return max((sum(own + 8 + at for left, own in rows if left >= at) for at in range(start, last + 1)), default=0)


@given(ROWS, st.integers(0, 100), st.integers(1, 400))
def test_a_newcomer_waits_for_the_first_end_after_which_it_fits_to_the_end_of_all(
    rows: list[tuple[int, int]], held: int, needed: int
) -> None:
    total = 500
    free = total - held
    iterations = BlockWait(rows, held, total).iterations(needed)
    if needed > free:
        assert iterations >= max((left for left, _ in rows), default=0)
    elif needed + most_held_from(rows, 0) <= free:
        assert iterations == 0
    else:
        first = next(at for at in sorted({left for left, _ in rows}) if needed + most_held_from(rows, at + 1) <= free)
        assert iterations == first


def test_more_than_the_cache_waits_for_one_turn_of_it_after_the_other() -> None:
    wait = BlockWait([(100, 50), (100, 50)], 0, 1000)
    assert 100 == wait.iterations(1000) < wait.iterations(1500) < wait.iterations(2000)
    assert wait.turnover == 1000 / 200
    assert BlockWait([], 0, 1000).iterations(1000) == 0
