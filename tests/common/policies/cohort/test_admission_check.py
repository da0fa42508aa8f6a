"""The admission test refuses nothing that is predicted in time, nothing that was accepted, and is monotone."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.policies.cohort.admission_check import INFEASIBLE, AdmissionTest, RefuseLate, admission_test
from cohort.common.policies.interface import Refuse, WaitingRequest
from cohort.common.types import Attempt, IfLate, Request, SamplingParams, Slo

OUTCOMES: tuple[IfLate, ...] = get_args(IfLate)
OPERATORS: tuple[RefuseLate, ...] = get_args(RefuseLate)

seconds = st.floats(0.0, 1e4)
outcomes = st.sampled_from(OUTCOMES)
operators = st.sampled_from(OPERATORS)
cautions = st.floats(0.5, 3.0)


def waiting(since_s: float = 0.0, ttft_s: float = 1.0, if_late: IfLate = "refuse", **changes: object) -> WaitingRequest:
    made = Request(
        Attempt("r", 0),
        "g",
        [1, 2, 3],
        3,
        SamplingParams(8),
        0.0,
        slo=Slo(ttft_s=ttft_s, deadline_s=9.0),
        if_late=if_late,
    )
    return WaitingRequest(msgspec.structs.replace(made, **changes), since_s, None)


@given(now_s=seconds, slack_s=seconds, predicted_s=seconds, if_late=outcomes, operator=operators, caution=cautions)
def test_what_is_predicted_in_time_is_served(
    now_s: float, slack_s: float, predicted_s: float, if_late: IfLate, operator: RefuseLate, caution: float
) -> None:
    verdict = admission_test(now_s, now_s + slack_s, predicted_s, if_late, operator, caution=caution)
    if now_s + caution * predicted_s <= now_s + slack_s:
        assert verdict == "serve"
    elif operator != "none" and if_late == "refuse":
        assert isinstance(verdict, Refuse) and verdict.reason == INFEASIBLE


@given(now_s=seconds, due_s=seconds, one_s=seconds, other_s=seconds, if_late=outcomes, operator=operators)
def test_a_later_forecast_never_helps(
    now_s: float, due_s: float, one_s: float, other_s: float, if_late: IfLate, operator: RefuseLate
) -> None:
    sooner, later = (
        admission_test(now_s, due_s, predicted_s, if_late, operator) for predicted_s in sorted((one_s, other_s))
    )
    if sooner != "serve":
        assert later != "serve"
    if isinstance(sooner, Refuse):
        assert isinstance(later, Refuse) and later.retry_after_s >= sooner.retry_after_s


@given(ttft_s=st.floats(0.1, 10.0), predicted_s=st.floats(0.0, 100.0), caution=cautions)
def test_after_that_time_the_same_request_would_be_in_time(ttft_s: float, predicted_s: float, caution: float) -> None:
    verdict = admission_test(0.0, ttft_s, predicted_s, "refuse", "named", caution=caution)
    if isinstance(verdict, Refuse):
        assert verdict.retry_after_s >= 1.0
        left_s = predicted_s - verdict.retry_after_s / caution  # at the pace that was predicted
        assert admission_test(0.0, ttft_s + 1e-6, left_s, "refuse", "named", caution=caution) == "serve"


LATE = {
    ("", "named"): "serve",
    ("", "all"): "refuse",
    ("refuse", "named"): "refuse",
    ("refuse", "all"): "refuse",
    ("best_effort", "named"): "best_effort",
    ("best_effort", "all"): "best_effort",
    ("serve", "named"): "serve",
    ("serve", "all"): "serve",
    **{(if_late, "none"): "serve" for if_late in OUTCOMES},
}


@pytest.mark.parametrize(("if_late", "operator"), LATE)
def test_what_becomes_of_a_late_request(if_late: IfLate, operator: RefuseLate) -> None:
    verdict = admission_test(0.0, 1.0, 4.0, if_late, operator, caution=1.0)
    assert (verdict if isinstance(verdict, str) else "refuse") == LATE[if_late, operator]
    if isinstance(verdict, Refuse):
        assert verdict.retry_after_s == 3.0


def test_late_by_less_than_a_second_is_retried_after_one() -> None:
    assert admission_test(0.0, 1.0, 1.2, "refuse", "named", caution=1.0) == Refuse(INFEASIBLE, 1.0)


@pytest.mark.parametrize(
    "changes",
    [
        {"traffic_class": "be"},
        {"online": False},
        {"slo": Slo()},
        {"slo": Slo(tpot_s=0.1)},
        {"attempt": Attempt("r", 1)},
        {"tokens": [1, 2, 3, 4]},
    ],
    ids=["best effort", "batch", "no SLO", "no TTFT SLO", "resubmitted", "has output"],
)
@pytest.mark.parametrize("if_late", ["refuse", "best_effort"])
def test_others_are_served_however_late(changes: dict[str, object], if_late: IfLate) -> None:
    late = waiting(if_late=if_late, **changes)
    assert AdmissionTest("all").judge(100.0, late, 1000.0) == "serve"


def test_a_verdict_says_what_it_was_based_on() -> None:
    test = AdmissionTest(caution=2.0)
    assert test.judge(10.5, waiting(since_s=10.0), 2.0) == Refuse(INFEASIBLE, 3.5, forecast_s=2.5)
    assert test.judge(10.5, waiting(since_s=10.0, if_late="best_effort"), 2.0) == "best_effort"


def test_waiting_in_the_queue_counts() -> None:
    test = AdmissionTest(caution=1.0)
    assert test.judge(10.0, waiting(since_s=10.0), 0.6) == "serve"
    assert isinstance(test.judge(10.5, waiting(since_s=10.0), 0.6), Refuse)


def test_a_demoted_request_keeps_nothing_but_its_deadline() -> None:
    demoted = waiting().request.as_best_effort()
    assert (demoted.traffic_class, demoted.slo) == ("be", Slo(deadline_s=9.0))
