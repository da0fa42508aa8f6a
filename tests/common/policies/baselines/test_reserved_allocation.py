"""What a request gets at admission: everything it can need, or what it is predicted to need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.baselines.reserved_allocation import (
    Reservation,
    all_positions,
    known_positions,
    predicted_positions,
)
from cohort.common.sequence import Phase, Sequence
from tests.common.policies.baselines.drive import BLOCK, cache, sequence


@pytest.mark.parametrize(
    ("rule", "positions"),
    [
        (known_positions, 10),
        (all_positions, 10 + 30 - 1),  # the last output token is never processed
        (predicted_positions(0.0), 10 + 8 - 1),
        (predicted_positions(0.15), 10 + 10 - 1),  # 8 · 1.15 = 9.2, so 10
        (predicted_positions(9.0), 10 + 30 - 1),  # never more than it may produce
    ],
)
def test_positions_by_hand(rule: Reservation, positions: int) -> None:
    one = sequence("a", 10, max_tokens=30, predicted=8.0)
    assert rule(one) == positions
    kv = cache(20, reservation=rule)
    assert kv.admit(one) == 0
    assert len(kv.blocks(one.key)) == -(-positions // BLOCK)


def test_a_sequence_beyond_its_prediction_gets_its_known_length() -> None:
    one = sequence("a", 10, max_tokens=30, predicted=3.0)
    one.tokens += [1] * 12  # preempted after twelve tokens
    assert predicted_positions(0.15)(one) == 22


def test_segments_that_move_reserve_nothing_ahead() -> None:
    one = sequence("a", 10, max_tokens=30, end=10)
    assert all_positions(one) == predicted_positions(1.0)(one) == 10


def test_no_blocks_for_the_reservation_is_no_admission() -> None:
    kv = cache(9, reservation=all_positions)
    one = sequence("a", 10, max_tokens=30)  # ten blocks
    assert kv.admit(one) is None
    assert (kv.free_blocks, kv.owners()) == (9, {})


def test_a_reserved_sequence_grows_without_asking_and_comes_back_whole() -> None:
    kv = cache(10, 10, reservation=all_positions)
    one = sequence("a", 10, max_tokens=30)
    kv.admit(one)
    one.phase = Phase.RUNNING
    assert all(kv.extend(one, positions) for positions in range(10, 40))
    assert kv.free_blocks == 0
    one.computed = 11
    assert kv.swap_out(one)
    (copy,) = kv.take_copies()
    assert len(copy.device) == 3  # only what holds KV travels
    assert kv.free_blocks == 10
    assert kv.swap_in(one)
    (back,) = kv.take_copies()
    assert len(back.device) == 3
    assert len(kv.blocks(one.key)) == 10
    kv.check()


def test_beyond_the_prediction_blocks_come_on_demand() -> None:
    kv = cache(4, reservation=predicted_positions(0.0))
    one, other = sequence("a", 8, predicted=1.0), sequence("b", 4, predicted=1.0)
    assert (kv.admit(one), kv.admit(other)) == (0, 0)
    assert kv.extend(one, 9)
    assert not kv.extend(other, 5)
    kv.check()


@given(
    requests=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20), st.floats(0.5, 40)), min_size=1, max_size=12),
    blocks=st.integers(1, 40),
    caching=st.booleans(),
    padding=st.floats(0, 1),
    everything=st.booleans(),
)
def test_a_sequence_admitted_under_its_reservation_never_waits_for_a_block(
    requests: list[tuple[int, int, float]], blocks: int, caching: bool, padding: float, everything: bool
) -> None:
    rule = all_positions if everything else predicted_positions(padding)
    kv = cache(blocks, reservation=rule, caching=caching)
    admitted: list[Sequence] = []
    for index, (prompt, output, predicted) in enumerate(requests):
        one = sequence(f"s{index % 3}", prompt, max_tokens=output, predicted=predicted)
        one = sequence(f"s{index}", prompt, max_tokens=output, predicted=predicted) if not caching else one
        if one.key not in kv.owners() and kv.admit(one) is not None:
            admitted.append(one)
        kv.check()
    for one in admitted:
        assert kv.extend(one, rule(one))
        kv.check()
        kv.release(one.key)
    assert kv.owners() == {}
    assert kv.free_blocks + kv.cached_blocks == blocks
