from __future__ import annotations

from cohort.common.machines.entry import Entry
from cohort.common.machines.gateway.peers import MAX_TIMEOUTS, PredictionClient, default_prediction
from cohort.common.messages import LengthFacts, ObserveLength, Predicted, PredictLength
from cohort.common.types import Attempt, FinishReason, Prediction, Request, SamplingParams

ANSWER = Prediction(9, 8, 12, 20)
FACTS = LengthFacts([1], False, 50, 1.0, 0, 1)
DEFAULT = default_prediction(100, 50)


def desk(*, wait_s: float = 0.02, exists: bool = True) -> PredictionClient:
    return PredictionClient(wait_s=wait_s, default_tokens=100, exists=exists)


def entry(request_id: str = "r") -> Entry:
    request = Request(Attempt(request_id, 0), "gateway", [1], 1, SamplingParams(max_tokens=50), 0.0)
    return Entry(request, opened_s=0.0, expires_s=9.0)


def test_an_answer_in_time_is_taken() -> None:
    one, a, b = desk(), entry("a"), entry("b")
    assert one.request_prediction(0.0, [a], FACTS) == PredictLength("a", FACTS)
    assert one.request_prediction(0.0, [b], FACTS) == PredictLength("b", FACTS)
    assert (a.prediction, one.due_s()) == (None, 0.02)
    assert one.answered(0.01, Predicted("b", ANSWER)) == ([b], False)
    assert one.answered(0.01, Predicted("a", ANSWER)) == ([a], False)
    assert (a.prediction, b.prediction, a.predict_s) == (ANSWER, ANSWER, 0.01)
    assert one.due_s() == float("inf") and one.overdue(1.0) == []


def test_all_choices_of_a_prompt_share_one_question() -> None:
    one, choices = desk(), [entry("a"), entry("b"), entry("c")]
    assert one.request_prediction(0.0, choices, FACTS) == PredictLength("a", FACTS)
    one.observed(choices[0], FinishReason.CANCELLED)  # the one in whose name it was asked is gone already
    assert one.answered(0.01, Predicted("a", ANSWER)) == (choices[1:], False)
    assert all(choice.facts is FACTS for choice in choices)


def test_an_answer_after_the_request_changes_nothing() -> None:
    one, a = desk(), entry()
    one.request_prediction(0.0, [a], FACTS)
    one.overdue(0.02)
    one.observed(a, FinishReason.CANCELLED)
    assert one.answered(0.5, Predicted("r", ANSWER)) == ([], False)
    assert a.prediction == DEFAULT


def test_a_request_that_ends_while_it_waits_is_waited_for_no_more() -> None:
    one, a = desk(), entry()
    one.request_prediction(0.0, [a], FACTS)
    one.observed(a, FinishReason.CANCELLED)
    assert one.due_s() == float("inf")
    assert one.overdue(1.0) == []


def test_a_predictor_that_is_away_is_asked_once_a_second_until_it_returns() -> None:
    one = desk()
    for _ in range(MAX_TIMEOUTS):
        one.request_prediction(0.0, [entry()], FACTS)
        one.overdue(0.02)
    assert one.away
    later = [entry(f"later-{number}") for number in range(20)]
    asked = [one.request_prediction(0.1, [each], FACTS) for each in later]
    assert [question for question in asked if question] == [PredictLength("later-0", FACTS)]
    assert [each.prediction for each in later] == [DEFAULT] * 20 and one.due_s() == float("inf")  # none waits
    later[1].output.append(5)
    assert one.observed(later[1], FinishReason.STOP) is None  # and nothing piles up
    assert one.request_prediction(1.0, [entry("early")], FACTS) is None
    assert one.request_prediction(1.2, [entry("probe")], FACTS) == PredictLength("probe", FACTS)
    one.answered(1.3, Predicted("probe", ANSWER))
    again = entry("again")
    assert one.request_prediction(1.4, [again], FACTS) == PredictLength("again", FACTS)
    assert again.prediction is None
    assert one.answered(1.4, Predicted("again", ANSWER)) == ([again], False)


def test_without_a_predictor_none_is_asked_or_taught() -> None:
    one, a = desk(exists=False), entry()
    assert one.request_prediction(0.0, [a], FACTS) is None
    assert a.prediction == DEFAULT
    a.output.append(5)
    assert one.observed(a, FinishReason.STOP) is None


def test_a_request_that_brings_its_prediction_is_not_asked_about_but_learned_from() -> None:
    one, a = desk(), entry()
    a.prediction = ANSWER
    assert one.request_prediction(0.0, [a], FACTS) is None
    a.output += [5, 6]
    assert one.observed(a, FinishReason.LENGTH) == ObserveLength("r", FACTS, 2, True)


def test_only_complete_answers_teach() -> None:
    for finish, taught in ((FinishReason.STOP, True), (FinishReason.CANCELLED, False), (FinishReason.FAILED, False)):
        one, a = desk(), entry()
        one.request_prediction(0.0, [a], FACTS)
        one.answered(0.0, Predicted("r", ANSWER))
        a.output.append(5)
        assert (one.observed(a, finish) is not None) == taught


def test_the_default_is_bounded_by_max_tokens() -> None:
    assert default_prediction(100, 7) == Prediction(7, 7, 7, 7, "default")
