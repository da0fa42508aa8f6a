"""The gateway machine alone: events in, effects out, time as an argument."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.errors import InvariantViolated
from cohort.common.machines.effects import Admitted, Deliver, Ended, Fail, ManagerFound, Rejected, Send, Wake
from cohort.common.machines.events import (
    Closed,
    DrainEnded,
    DrainStarted,
    Estimated,
    Offered,
    PeerLost,
    Received,
    Tick,
    Undelivered,
)
from cohort.common.messages import (
    AttemptsLost,
    Cancel,
    GatewayHello,
    ManagerHello,
    ObserveLength,
    Outstanding,
    Placed,
    PredictLength,
    Refused,
    Registered,
    RevisePrediction,
    Submit,
    TokenBatch,
    TokenUpdate,
)
from cohort.common.types import Attempt, FinishReason, Slo
from tests.common.machines.small_gateway import ANSWER, LOAD, Gateway, only, request, sent
from tests.examples import examples

QUIET_LOAD = msgspec.structs.replace(LOAD, quiet_s=5.0)

# -- a request's life ----------------------------------------------------------------------------------------------


def test_a_request_from_offer_to_end() -> None:
    gateway = Gateway()
    first, *_ = gateway.offer("r")
    assert isinstance(first, Admitted)
    [entry] = first.entries
    assert [question.request_id for question in sent(PredictLength, gateway.effects, "predictor")] == ["r"]
    assert sent(Submit, gateway.effects) == []
    [submit] = sent(Submit, gateway.answer("r"), "manager")
    assert (submit.request.prediction, submit.request.waited_s) == (ANSWER, 0.0)
    gateway.manager(Placed(Attempt("r", 0), ["w"], 0.1, "test"))
    gateway.effects.clear()
    gateway.tokens("r", 3, [10, 11])
    gateway.tokens("r", 5, [99], finish=FinishReason.STOP)
    assert gateway.effects == [
        Deliver(entry, [10, 11], []),
        Deliver(entry, [99], [], FinishReason.STOP),
        Send("predictor", ObserveLength("r", entry.facts, 3, False)),  # type: ignore[arg-type]
        Ended(entry, FinishReason.STOP, ""),
    ]
    assert len(gateway.machine.ledger) == 0


def test_a_failure_is_told_once_and_ends_it() -> None:
    gateway = Gateway()
    entry = gateway.serve("r")
    gateway.manager(Refused(Attempt("r", 0), 400, "too long for any worker"))
    gateway.manager(Refused(Attempt("r", 0), 400, "too long for any worker"))
    [fail], [ended] = only(Fail, gateway.effects), only(Ended, gateway.effects)
    assert (fail.entry, fail.error.status) == (entry, 400)
    assert (ended.finish, ended.reason) == (FinishReason.FAILED, "too long for any worker")
    assert "400" in repr(fail) and "r#0" in repr(fail)  # a recording holds the text


def test_closing_frees_everywhere_and_says_that_it_is_over() -> None:
    gateway = Gateway()
    entry = gateway.serve("r")
    cancel = Cancel([Attempt("r", 0)], "a stop string was found")
    closed = Closed("r", FinishReason.STOP, "a stop string was found")
    assert gateway.tell(closed) == [
        Send("manager", cancel),
        Send("w", cancel),
        Ended(entry, FinishReason.STOP, "a stop string was found"),
    ]
    assert gateway.tell(closed) == []


def test_a_stop_string_teaches_the_predictor_but_a_client_that_left_does_not() -> None:
    for finish, observed in ((FinishReason.STOP, 1), (FinishReason.CANCELLED, 0)):
        gateway = Gateway()
        gateway.serve("r")
        gateway.tokens("r", 3, [10, 11])
        gateway.tell(Closed("r", finish, "test"))
        assert len(sent(ObserveLength, gateway.effects)) == observed


def test_lost_requests_go_out_again_at_once_in_the_order_they_came() -> None:
    gateway = Gateway()
    gateway.serve("b", priority=0)
    gateway.now_s = 2.0
    [admitted] = only(Admitted, gateway.tell(Offered("x", [msgspec.structs.replace(request("a"), arrival_s=0.5)])))
    gateway.answer("a")
    gateway.now_s = 3.0
    effects = gateway.manager(AttemptsLost([Attempt("b", 0), Attempt("a", 0)], "w is dead"))
    submits = [submit.request for submit in sent(Submit, effects)]
    assert [each.attempt for each in submits] == [Attempt("a", 1), Attempt("b", 1)]
    assert [each.waited_s for each in submits] == [1.0, 3.0]
    assert admitted.entries[0].lost_kind == "lost"


def test_no_tokens_at_all_are_delivered_in_the_same_call() -> None:
    gateway = Gateway(predictor="")
    admitted, deliver, ended = (effect for effect in gateway.offer("r", max_tokens=0) if not isinstance(effect, Wake))
    assert isinstance(admitted, Admitted) and isinstance(deliver, Deliver) and isinstance(ended, Ended)
    assert deliver.finish is FinishReason.LENGTH


def test_deadlines_need_no_ticks_but_those_that_were_asked_for() -> None:
    gateway = Gateway(request_timeout_s=30.0, max_attempts=2)
    gateway.serve("r")
    effects = gateway.live(31.0)
    [again] = sent(Submit, effects)
    assert again.request.attempt == Attempt("r", 1)
    [fail] = only(Fail, effects)
    assert fail.error.status == 504


# -- admission -----------------------------------------------------------------------------------------------------


def test_all_choices_of_an_offer_come_in_or_none() -> None:
    gateway = Gateway(max_waiting_requests=3)
    gateway.offer("a", "b", choices_per_prompt=2)
    [rejected] = only(Rejected, gateway.offer("c", "d", choices_per_prompt=2))
    assert (rejected.error.status, rejected.offer_id) == (429, "offer")
    assert rejected.error.retry_after_s == 1.5  # three waiting, two a second finish
    assert len(gateway.machine.ledger) == 2
    assert only(Admitted, gateway.offer("c"))


def test_admission_sees_the_larger_of_its_own_queue_and_the_managers() -> None:
    gateway = Gateway(max_waiting_requests=3)
    gateway.manager(msgspec.structs.replace(LOAD, waiting=3))  # another gateway's
    assert only(Rejected, gateway.offer("a"))
    assert only(Rejected, gateway.tell(Estimated("e", 100, "rt")))
    gateway.manager(LOAD)
    assert only(Admitted, gateway.tell(Estimated("e", 100, "rt"))) == [Admitted("e", [])]
    gateway.serve("a")  # placed: it waits no more
    assert only(Admitted, gateway.offer("b", "c", "d"))
    assert only(Rejected, gateway.offer("e"))


def test_waiting_tokens_count_prompt_and_expected_output() -> None:
    gateway = Gateway(max_waiting_tokens=1000, default_prediction_tokens=400)
    gateway.offer("a", max_tokens=10_000)
    assert gateway.machine.ledger.waiting_tokens == 403
    assert only(Admitted, gateway.offer("b", max_tokens=590))  # 403 more
    assert only(Rejected, gateway.offer("c", max_tokens=300))
    assert only(Rejected, gateway.tell(Estimated("e", 4 * 200, "rt")))


def test_real_time_requests_that_name_no_slo_get_the_default_and_those_with_a_deadline_keep_that_alone() -> None:
    gateway = Gateway(predictor="", rt_ttft_slo_s=1.5, rt_tpot_slo_s=0.25)
    gateway.offer("plain")
    gateway.offer("half", slo=Slo(tpot_s=0.1))
    gateway.offer("whole", slo=Slo(deadline_s=9.0))
    gateway.offer("batch", traffic_class="be")
    slos = [submit.request.slo for submit in sent(Submit, gateway.effects)]
    assert slos == [Slo(1.5, 0.25), Slo(1.5, 0.1), Slo(deadline_s=9.0), Slo()]


# -- prediction ----------------------------------------------------------------------------------------------------


def test_choices_of_a_prompt_share_a_question_and_their_tokens() -> None:
    gateway = Gateway()
    tokens = [1, 2]
    requests = [msgspec.structs.replace(request(name), tokens=tokens, prompt_tokens=2) for name in "abcd"]
    gateway.tell(Offered("offer", requests, choices_per_prompt=2))
    assert [question.request_id for question in sent(PredictLength, gateway.effects)] == ["a", "c"]
    submits = sent(Submit, gateway.answer("c"))
    assert [submit.request.request_id for submit in submits] == ["c", "d"]
    assert all(submit.request.tokens is tokens for submit in submits)


def test_a_prediction_is_waited_for_only_so_long_and_corrected_later() -> None:
    gateway = Gateway()
    gateway.offer("r")
    assert gateway.wake_s == 0.02
    assert sent(Submit, gateway.until(0.019)) == []
    [submit] = sent(Submit, gateway.until(0.02))
    assert submit.request.prediction is not None and submit.request.prediction.source == "default"
    assert gateway.machine.default_predictions_total == 1
    assert sent(RevisePrediction, gateway.answer("r"), "manager") == [RevisePrediction("r", ANSWER)]
    assert sent(RevisePrediction, gateway.answer("r")) == []


def test_a_late_prediction_of_an_unsubmitted_request_rides_along() -> None:
    gateway = Gateway()
    gateway.offer("r")
    gateway.until(0.02)
    [submit] = sent(Submit, gateway.effects)
    gateway.tell(Undelivered("manager", submit))
    assert sent(RevisePrediction, gateway.answer("r")) == []
    [submit] = sent(Submit, gateway.manager(ManagerHello(1)))
    assert submit.request.prediction == ANSWER


def test_a_question_that_cannot_be_sent_costs_no_wait() -> None:
    gateway = Gateway()
    gateway.offer("r")
    [question] = sent(PredictLength, gateway.effects)
    [submit] = sent(Submit, gateway.tell(Undelivered("predictor", question)))
    assert submit.request.prediction is not None and submit.request.prediction.source == "default"


# -- the manager ---------------------------------------------------------------------------------------------------


def test_it_greets_before_it_submits() -> None:
    gateway = Gateway(predictor="", greeted=False)
    assert sent(GatewayHello, gateway.tell(Tick())) == [GatewayHello("gateway", 1, "inbox")]
    assert sent(Submit, gateway.offer("r")) == []
    assert "not answered" in (gateway.machine.not_ready_because(0.0) or "")
    effects = gateway.manager(ManagerHello(1))
    assert only(ManagerFound, effects) == [ManagerFound(1, 1)]
    assert len(sent(Submit, effects)) == 1
    gateway.manager(LOAD)
    assert gateway.machine.not_ready_because(0.0) is None


def test_a_silent_manager_is_greeted_several_times_a_second_and_gets_nothing_new() -> None:
    gateway = Gateway(predictor="")
    assert sent(GatewayHello, gateway.until(0.5)) == []
    greetings = sent(GatewayHello, gateway.until(1.0))
    assert greetings == [GatewayHello("gateway", 1, "inbox", ["w"])] * 3  # at 0.6, 0.8 and 1.0
    assert sent(Submit, gateway.offer("r")) == []
    assert gateway.machine.not_ready_because(1.0) is None
    gateway.until(2.5)
    assert "silent for 2.5 s" in (gateway.machine.not_ready_because(2.5) or "")
    assert len(sent(Submit, gateway.manager(LOAD))) == 1  # it was busy, and is the same


def test_another_manager_hears_of_running_requests_and_gets_waiting_ones() -> None:
    gateway = Gateway(predictor="")
    gateway.offer("runs")
    gateway.manager(Placed(Attempt("runs", 0), ["w"], 0.1, "test"))
    gateway.offer("waits")
    gateway.until(0.7)
    gateway.offer("new")
    gateway.effects.clear()
    gateway.manager(ManagerHello(2))
    messages = [send.message for send in only(Send, gateway.effects) if not isinstance(send.message, Cancel)]
    hello, waited, named, new = messages
    assert hello == GatewayHello("gateway", 1, "inbox", ["w"])  # it may not know us yet
    assert isinstance(waited, Submit) and waited.request.attempt == Attempt("waits", 1)
    assert named == Outstanding([Attempt("runs", 0)])
    assert isinstance(new, Submit) and new.request.attempt == Attempt("new", 0)
    gateway.effects.clear()
    gateway.manager(ManagerHello(2))
    assert gateway.effects == []


def test_a_manager_that_was_replaced_loses_no_request_and_hears_that_it_was() -> None:
    gateway = Gateway(standbys=("manager-1",))
    entry = gateway.serve("r")
    gateway.tell(Received("manager-1", ManagerHello(2, epoch=9)))
    effects = gateway.manager(AttemptsLost([Attempt("r", 0)], "silent for 3.0 s"))
    assert len(sent(GatewayHello, effects, "manager")) == len(only(Send, effects)) == 1
    assert (entry.attempt, gateway.machine.fenced_total) == (Attempt("r", 0), 1)
    lost = gateway.tell(Received("manager-1", AttemptsLost([Attempt("r", 0)], "worker dead")))
    assert len(sent(Submit, lost, "manager-1")) == len(sent(Submit, lost)) == 1


def test_a_quiet_manager_counts_as_silent_only_after_what_it_announced_or_once_it_has_work() -> None:
    gateway = Gateway()
    gateway.manager(QUIET_LOAD)
    assert not sent(GatewayHello, gateway.until(5.5))
    assert sent(GatewayHello, gateway.until(5.7))  # 5 s and three loads
    gateway.manager(ManagerHello(1), QUIET_LOAD)
    gateway.until(7.0)
    gateway.offer("a")
    gateway.answer("a")
    gateway.manager(QUIET_LOAD)  # was sent before it knew
    assert sent(GatewayHello, gateway.until(7.7))


def test_the_end_of_the_managers_connection_ends_its_quiet() -> None:
    gateway = Gateway()
    gateway.manager(QUIET_LOAD)
    gateway.until(1.0)
    gateway.tell(PeerLost("monitor"))
    assert not sent(GatewayHello, gateway.until(2.0))
    gateway.tell(PeerLost("manager"))
    assert sent(GatewayHello, gateway.until(2.7))


def test_a_quiet_gateway_names_its_first_request_as_soon_as_any_other() -> None:
    gateway = Gateway()
    gateway.now_s = gateway.wake_s
    gateway.tell(Tick(60.0))
    gateway.serve("a")
    assert sent(Outstanding, gateway.live(gateway.now_s + 1.2))


def test_outstanding_requests_are_named_once_a_second() -> None:
    gateway = Gateway(predictor="")
    gateway.offer("r")
    assert sent(Outstanding, gateway.live(4.1)) == [Outstanding([Attempt("r", 0)])] * 4


def test_a_submit_that_was_not_handed_over_is_tried_again() -> None:
    gateway = Gateway(predictor="")
    [submit] = sent(Submit, gateway.offer("r"))
    assert gateway.tell(Undelivered("manager", submit)) == []
    assert gateway.machine.ledger.outstanding() == []
    assert sent(Submit, gateway.live(0.9)) == []
    assert sent(Submit, gateway.live(3.0)) == [submit]


def test_a_submit_that_was_not_handed_over_goes_out_as_soon_as_a_lost_manager_speaks() -> None:
    gateway = Gateway(predictor="")
    [submit] = sent(Submit, gateway.offer("r"))
    gateway.tell(Undelivered("manager", submit))
    assert sent(Submit, gateway.until(1.5)) == []  # silent since the start
    assert sent(Submit, gateway.manager(LOAD)) == [submit]


def test_an_unexpected_message_changes_nothing() -> None:
    gateway = Gateway()
    assert gateway.manager(Registered(3)) == []


# -- the end -------------------------------------------------------------------------------------------------------


def test_draining_takes_nothing_new_and_then_fails_the_rest() -> None:
    gateway = Gateway(drain_s=12.0)
    entry = gateway.serve("r")
    gateway.tell(DrainStarted())
    assert "shutting down" in (gateway.machine.not_ready_because(0.0) or "")
    refusals = only(Rejected, [*gateway.tell(Estimated("e", 9, "rt")), *gateway.offer("s")])
    assert [(each.error.status, each.error.retry_after_s) for each in refusals] == [(503, 12.0)] * 2
    gateway.tokens("r", 3, [10])
    assert only(Deliver, gateway.effects) == [Deliver(entry, [10], [])]
    effects = gateway.tell(DrainEnded())
    assert [fail.error.status for fail in only(Fail, effects)] == [503]
    assert [cancel.attempts for cancel in sent(Cancel, effects, "w")] == [[Attempt("r", 0)]]
    assert len(gateway.machine.ledger) == 0


def test_a_counter_that_is_wrong_is_found() -> None:
    gateway = Gateway()
    gateway.offer("r")
    gateway.machine.ledger.waiting_tokens -= 1
    with pytest.raises(InvariantViolated):
        gateway.machine.check()


def test_decisions_before_a_defect_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    gateway = Gateway()
    entry = gateway.serve("r")
    monkeypatch.setattr(gateway.machine.ledger, "placed", lambda *_: 1 / 0)
    good = TokenBatch("w", [TokenUpdate(Attempt("r", 0), 3, [10])])
    with pytest.raises(ZeroDivisionError):
        gateway.machine.handle(0.0, Received("w", good), Received("manager", Placed(Attempt("r", 0), [], 0, "")))
    assert gateway.machine.handle(0.0) == [Deliver(entry, [10], [])]


# -- whatever happens ----------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("offer"), st.integers(1, 3)),
        st.tuples(st.just("place"), st.integers(0, 9)),
        st.tuples(st.just("token"), st.integers(0, 9)),
        st.tuples(st.just("displace"), st.integers(0, 9)),
        st.tuples(st.just("close"), st.integers(0, 9)),
        st.tuples(st.just("unsent"), st.integers(0, 9)),
        st.tuples(st.just("predict"), st.integers(0, 9)),
        st.tuples(st.just("manager"), st.integers(1, 3)),
        st.tuples(st.just("wait"), st.sampled_from([1, 30, 700, 12_000])),
    ),
    max_size=40,
)


@settings(max_examples=examples(1))
@given(STEPS)
def test_every_admitted_request_ends_once_and_nothing_is_left(steps: list[tuple[str, int]]) -> None:
    gateway = Gateway(max_attempts=3, request_timeout_s=60.0)
    names: list[str] = []
    submits: list[Submit] = []
    seen = 0
    for what, number in steps:
        entries = [entry for name in names if (entry := gateway.machine.ledger.get(name))]
        entry = entries[number % len(entries)] if entries else None
        match what:
            case "offer":
                fresh = [f"r{len(names) + index}" for index in range(number)]
                names += fresh
                gateway.offer(*fresh, choices_per_prompt=number)
            case "manager":
                gateway.manager(ManagerHello(number), LOAD)
            case "wait":
                gateway.until(gateway.now_s + number / 1000)
            case "unsent" if submits:
                gateway.tell(Undelivered("manager", submits[number % len(submits)]))
            case "predict" if names:
                gateway.answer(names[number % len(names)])
            case "place" if entry:
                gateway.manager(Placed(entry.attempt, ["w"], 0.0, "test"))
            case "token" if entry:
                gateway.tokens(entry.request_id, entry.known, [10], attempt=entry.attempt.number)
            case "displace" if entry:
                gateway.manager(AttemptsLost([entry.attempt], "test"))
            case "close" if entry:
                gateway.tell(Closed(entry.request_id, FinishReason.CANCELLED, "test"))
        submits += sent(Submit, gateway.effects[seen:])
        seen = len(gateway.effects)
    gateway.until(gateway.now_s + 70.0)  # deadlines end what is left
    admitted = [entry.request_id for effect in only(Admitted, gateway.effects) for entry in effect.entries]
    assert sorted(ended.entry.request_id for ended in only(Ended, gateway.effects)) == sorted(admitted)
    assert len(gateway.machine.ledger) == 0
    for name in names:  # attempts only ever grow, and each is submitted again only if it was not handed over
        numbers = [submit.request.attempt.number for submit in submits if submit.request.request_id == name]
        assert numbers == sorted(numbers)
