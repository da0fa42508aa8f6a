"""What a split is worth: all of it for the last request of all, little where the next one fills the time anyway."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.dynaserve.split_gain import PlacementRate, split_gain_s


def test_without_further_requests_the_whole_difference_counts() -> None:
    assert split_gain_s(1.0, 0.8, 0.6, 0.8, 0.0) == pytest.approx(0.2)


def test_by_hand() -> None:
    """A request a second. 0.2 s of work go to an instance that would have been done at 1.0 s; the chance that no
    request came before is e^-1 = 0.3679 then and e^-1.2 = 0.3012 at the end, 0.3335 between: (0.3679 - 0.3012) /
    0.2."""
    assert split_gain_s(1.4, 1.2, 1.0, 1.2, 1.0) == pytest.approx(0.2 * 0.3335, rel=1e-3)


def test_no_gain_is_none_however_seldom_requests_come() -> None:
    assert split_gain_s(1.0, 1.1, 0.6, 1.1, 0.0) == 0.0
    assert split_gain_s(1.0, 0.9, 0.9, 0.9, 1.0) == pytest.approx(0.1)  # nothing was given to the other


def test_against_drawing_when_the_next_request_comes() -> None:
    """The idle time that the work given away takes from the other instance, by trial."""
    random, before_s, after_s, rate = Random(1), 0.3, 0.8, 2.0
    gaps = [random.expovariate(rate) for _ in range(40_000)]
    idle_s = sum(min(max(gap - before_s, 0.0), after_s - before_s) for gap in gaps) / len(gaps)
    assert split_gain_s(1.3, 0.8, before_s, after_s, rate) == pytest.approx(idle_s, rel=0.03)


@given(
    later=st.floats(0.01, 5),
    gain=st.floats(0, 5),
    before=st.floats(0, 5),
    given_s=st.floats(0, 5),
    rate=st.floats(0, 100),
    more=st.floats(0, 100),
    busier=st.floats(0, 5),
)
def test_more_requests_and_more_work_leave_less_to_gain(
    later: float, gain: float, before: float, given_s: float, rate: float, more: float, busier: float
) -> None:
    worth_s = split_gain_s(later + gain, later, before, before + given_s, rate)
    assert 0.0 <= worth_s <= gain + 1e-9
    assert split_gain_s(later + gain, later, before, before + given_s, rate + more) <= worth_s + 1e-9
    if given_s > 1e-6:
        elsewhere_s = split_gain_s(later + gain, later, before + busier, before + busier + given_s, rate)
        assert elsewhere_s <= worth_s + 1e-9


def test_the_rate_is_unknown_at_first_and_forgets_old_values() -> None:
    rate = PlacementRate()
    for index in range(3):
        rate.placed(float(index))
    assert rate.per_s(3.0) == 0.0
    rate.placed(3.0)
    assert rate.per_s(4.0) == pytest.approx(1.0)
    assert rate.per_s(8.0) == pytest.approx(0.5)  # a pause lowers it while it lasts
    for index in range(200):
        rate.placed(10.0 + 0.1 * index)
    assert rate.per_s(30.0) == pytest.approx(10.0)


def test_all_at_once_is_no_rate() -> None:
    rate = PlacementRate()
    for _ in range(10):
        rate.placed(5.0)
    assert rate.per_s(5.0) == 0.0
