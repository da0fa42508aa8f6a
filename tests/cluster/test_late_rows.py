"""Rows that sit steps out, waiting for their grammars, under every preset: the answers are those without."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cluster.cases import Case, cases, every_second, every_third, left_by_clients
from tests.common.machines.clusters import total
from tests.examples import of_worlds
from tests.support.kinds import by_default


@pytest.mark.parametrize("preset", every_second(0))
@pytest.mark.parametrize("acceptance", by_default([None, 0.8], 0.8))
def test_no_token_is_lost_or_doubled(preset: str, acceptance: float | None) -> None:
    """The world compares every token with what is expected, and each engine every slot that a row reads."""
    for seed, blocks in ((1, 64), (2, 24)):
        case = left_by_clients(preset, seed, blocks, shortest=8, arrival_s=lambda index, share: 0.1 * index + share)
        world = case.live(lateness=0.3, acceptance=acceptance)
        assert total(world, "late_rows") > 50


@pytest.mark.parametrize("preset", every_third(2))
def test_tokens_are_right_whatever_breaks(preset: str) -> None:
    @of_worlds(0.03)
    @given(case=cases(preset), lateness=st.sampled_from([0.05, 0.5, 0.9]))
    def check(case: Case, lateness: float) -> None:
        case.live(lateness=lateness)

    check()
