"""The peak of what all sequences will hold: by hand, and against counting every iteration."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.ecoserve.by_forecast import Forecast


def test_the_second_fits_because_the_first_is_gone_before_it_grows() -> None:
    """Blocks of 4. The first holds 8 positions and needs 8 more, at its end 4 blocks; the second has 4 and needs 16
    more, so it holds 3 blocks when the first ends, and 5 alone at its own end: 7 together, not 9."""
    forecast = Forecast(7, 4)
    forecast.add(8, 8)
    assert forecast.fits(4, 16)
    assert not Forecast(4, 4).fits(4, 16)
    tight = Forecast(6, 4)
    tight.add(8, 8)
    assert not tight.fits(4, 16)


def test_held_and_spared_blocks_are_not_free() -> None:
    forecast = Forecast(10, 4)
    forecast.hold(3)
    assert forecast.fits(4, 24)  # 7 blocks
    assert not forecast.fits(4, 25)
    assert not forecast.fits(4, 24, spare=1)
    forecast.hold(-1)
    assert forecast.fits(4, 24, spare=1)


def test_asking_changes_nothing() -> None:
    forecast = Forecast(7, 4)
    for _ in range(3):
        assert forecast.fits(8, 12)
    forecast.add(8, 12)
    assert not forecast.fits(8, 12)


@given(
    members=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 40)), min_size=1, max_size=8),
    size=st.sampled_from([1, 4, 16]),
    blocks=st.integers(1, 60),
)
def test_against_every_iteration(members: list[tuple[int, int]], size: int, blocks: int) -> None:
    forecast = Forecast(blocks, size)
    for computed, left in members[:-1]:
        forecast.add(computed, left)
    peak = max(
        sum(-(-(computed + t) // size) for computed, left in members if left >= t)
        for t in range(1, max(left for _, left in members) + 1)
    )
    alone = max(sum(-(-(c + t) // size) for c, left in members[:-1] if left >= t) for t in range(41))
    assert forecast.fits(*members[-1]) == (peak <= blocks)
    assert peak >= alone
