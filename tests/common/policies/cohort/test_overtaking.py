"""The share of time that later, shorter prompts take."""

from __future__ import annotations

from math import exp

import pytest
from cohort.common.policies.cohort.overtaking import Overtaking
from hypothesis import given
from hypothesis import strategies as st

arrivals = st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, 5000)), max_size=30)


@given(gaps=arrivals, own=st.integers(1, 10_000), later_s=st.floats(0.0, 50.0))
def test_it_is_the_forgetting_sum_of_the_shorter_ones(gaps: list[tuple[float, int]], own: int, later_s: float) -> None:
    known, now_s, came = Overtaking(), 100.0, []
    for gap_s, tokens in gaps:
        now_s += gap_s
        known.arrived(now_s, tokens)
        came.append((now_s, tokens))
    now_s += later_s
    found = known.tokens_per_s(now_s, own)
    weights = [(exp((at_s - now_s) / 20.0), tokens) for at_s, tokens in came]
    # Shorter by less than a class of length may count or not.
    surely = sum(weight * tokens for weight, tokens in weights if tokens <= own / 2 ** (1 / 4))
    perhaps = sum(weight * tokens for weight, tokens in weights if tokens < own)
    seen_s = 20.0 * (1.0 - exp(-max(2.0, now_s - came[0][0]) / 20.0)) if came else 1.0
    assert surely / seen_s - 1e-9 <= found * (1 + 1e-9) and found <= perhaps / seen_s * (1 + 1e-9) + 1e-9


@pytest.mark.parametrize("seconds", [5, 100])
def test_a_steady_stream_is_its_rate_from_the_start_on(seconds: int) -> None:
    known = Overtaking()
    for tick in range(10 * seconds):
        known.arrived(tick / 10, 30)
    assert known.tokens_per_s(seconds, 100) == pytest.approx(300, rel=0.05)
    assert known.tokens_per_s(seconds, 20) == 0.0


def test_nothing_known_overtakes_nothing() -> None:
    assert Overtaking().tokens_per_s(3.0, 1000) == 0.0
