from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.baselines.bounded_admission import UNKNOWN_RATE_RETRY_S, BoundedAdmission
from cohort.common.policies.interface import MAX_RETRY_S, MIN_RETRY_S, AdmissionLoad, Admit, Offer, Refuse
from cohort.common.types import Slo

POLICY = BoundedAdmission(max_waiting_requests=10, max_waiting_tokens=1000)


def offer(prompt: int = 50, predicted: float = 50) -> Offer:
    return Offer(prompt, 100, predicted, "rt", 0, Slo())


def load(requests: int = 0, tokens: int = 0, rate: float = 2.0) -> AdmissionLoad:
    return AdmissionLoad(requests, tokens, 0, rate, 0, 0)


def test_queue_capacity_is_a_bound() -> None:
    assert POLICY.decide(0.0, offer(), load(9, 900)) == Admit()


def test_a_full_queue_refuses_for_as_long_as_it_takes_to_drain() -> None:
    assert POLICY.decide(0.0, offer(), load(10, 100)) == Refuse("10 requests are waiting already", 5.0)


def test_waiting_tokens_are_bounded_too() -> None:
    assert POLICY.decide(0.0, offer(), load(4, 901)) == Refuse("901 tokens are waiting already", 2.0)


def test_a_giant_gets_in_when_it_is_alone() -> None:
    assert POLICY.decide(0.0, offer(5000), load(0, 0)) == Admit()
    assert isinstance(POLICY.decide(0.0, offer(5000), load(1, 1)), Refuse)


def test_an_unknown_pace_has_its_own_answer() -> None:
    assert POLICY.decide(0.0, offer(), load(10, rate=0.0)) == Refuse(
        "10 requests are waiting already", UNKNOWN_RATE_RETRY_S
    )


@given(st.integers(0, 10**6), st.integers(0, 10**9), st.floats(0, 1e6), st.integers(0, 10**6))
def test_the_bounds_hold_and_retry_after_is_sane(requests: int, tokens: int, rate: float, prompt: int) -> None:
    decision = POLICY.decide(0.0, offer(prompt), load(requests, tokens, rate))
    if isinstance(decision, Refuse):
        assert MIN_RETRY_S <= decision.retry_after_s <= MAX_RETRY_S
    else:
        assert requests < 10
        assert requests == 0 or tokens + prompt + 50 <= 1000
