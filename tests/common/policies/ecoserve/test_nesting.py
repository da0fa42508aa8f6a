"""Decodes that fit into a second half: Figure 9a, block edges, the buffer, and brute force."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.ecoserve.loans import Candidate, Place, closest, longest_borrower, second_half
from tests.common.policies.baselines.drive import sequence

SOMEBODY = sequence("x", 1)


def candidate(length: int, deadline_s: float = 0.0, blocks: int = 1, key: str = "x") -> Candidate:
    return Candidate(length, deadline_s, key, blocks, SOMEBODY)


def test_figure_9a() -> None:
    assert second_half(0, 32, 4) == Place(4, 8, 16)
    assert longest_borrower(Place(4, 8, 16), 0.0) == 16


def test_the_middle_moves_to_a_block_boundary() -> None:
    assert second_half(3, 30, 4) == Place(5, 8, 17)  # the middle is 17, block 5 begins at 20
    assert second_half(3, 5, 4) == Place(1, 2, 1)
    assert second_half(5, 7, 4) is None


def test_the_buffer_shortens_the_borrower() -> None:
    assert longest_borrower(Place(4, 8, 16), 0.15) == 13
    assert longest_borrower(Place(4, 8, 16), 1.0) == 8


def test_the_rest_of_a_place_is_reached_later() -> None:
    assert Place(4, 8, 16).rest_after(3, 4) == Place(7, 8, 28)


def test_the_longest_that_is_done_in_time_and_of_equals_the_loosest() -> None:
    candidates = sorted([candidate(9), candidate(12, 1.0, key="a"), candidate(12, 7.0, key="b"), candidate(14)])
    chosen = closest(candidates, Place(4, 8, 14), 0.15)
    assert chosen is not None
    assert (candidates[chosen].length, candidates[chosen].key) == (12, "b")
    assert closest(candidates, Place(4, 8, 9), 0.15) is None


def test_blocks_must_suffice_and_be_needed() -> None:
    candidates = sorted([candidate(4, blocks=0), candidate(6, blocks=2), candidate(8, blocks=5)])
    chosen = closest(candidates, Place(4, 8, 16), 0.0)
    assert chosen is not None and candidates[chosen].length == 6


@given(
    computed=st.integers(0, 60),
    length=st.integers(1, 80),
    size=st.sampled_from([1, 4, 16]),
    buffer=st.floats(0, 0.5),
    waiting=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3), st.integers(0, 6)), max_size=12),
)
def test_against_brute_force(
    computed: int, length: int, size: int, buffer: float, waiting: list[tuple[int, int, int]]
) -> None:
    place = second_half(computed, computed + length, size)
    middle = computed + length / 2
    starts = [b for b in range(200) if b * size >= middle and b * size > computed and b * size < computed + length]
    assert (place.first_block if place else None) == (starts[0] if starts else None)
    if place is None:
        return
    candidates = sorted(candidate(n, float(d), b, str(i)) for i, (n, d, b) in enumerate(waiting))
    fitting = [c for c in candidates if c.length <= place.iterations / (1 + buffer) and 1 <= c.blocks <= place.blocks]
    chosen = closest(candidates, place, buffer)
    assert (candidates[chosen] if chosen is not None else None) == (max(fitting) if fitting else None)


@given(st.integers(0, 5000), st.integers(1, 3000), st.sampled_from([1, 16, 32]), st.floats(0.0, 1.0))
def test_no_borrower_fits_beyond_half_and_a_block(computed: int, left: int, size: int, buffer: float) -> None:
    """By which lenders are passed over before their tables are looked at (`LendingRule.arrange`)."""
    place = second_half(computed, computed + left, size)
    if place is not None:
        assert (1.0 + buffer) * longest_borrower(place, buffer) <= left / 2 + size
