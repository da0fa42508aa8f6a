"""What a cache holds at worst, beside a simulation of every pass."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.dynaserve.kv_forecast import peak_growth


def test_by_hand() -> None:
    """Three requests; after 2 passes the first ends (3 · 2 = 6 more) and frees 10; after 5 the second: 2 · 5 − 10."""
    assert peak_growth([(10, 2), (4, 5), (20, 5)]) == 6
    assert peak_growth([(1, 2), (4, 5), (20, 5)]) == 9  # 2 · 5 − 1
    assert peak_growth([]) == 0
    assert peak_growth([(100, 0)]) == 0


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=8))
def test_against_every_pass(holders: list[tuple[int, int]]) -> None:
    now = most = sum(held for held, _ in holders)
    for passed in range(1, 31):
        there = [(held, coming) for held, coming in holders if coming >= passed]
        most = max(most, sum(held + passed for held, _ in there))
    assert now + peak_growth(holders) == most
