from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cohort.common.errors import InvariantViolated, RequestError
from cohort.common.machines.effects import Deliver, Fail
from cohort.common.machines.entry import Entry, State
from cohort.common.machines.gateway.ledger import Action, CancelAttempt, Ledger, SubmitAttempt
from cohort.common.messages import Placed, Refused, StageTimes, TokenLogprob, TokenUpdate
from cohort.common.types import Attempt, FinishReason, Prediction, Request, SamplingParams, Slo
from tests.examples import examples

PROMPT = [5, 6, 7]
END = 99


def ledger(**options: Any) -> Ledger:
    return Ledger(**{"stall_timeout_s": 10.0, "request_timeout_s": 100.0, "max_attempts": 3, **options})


def request(request_id: str = "r", *, max_tokens: int = 5, logprobs: int = -1, stop: tuple[int, ...] = ()) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, stop_token_ids=stop)
    return Request(Attempt(request_id, 0), "gateway", PROMPT, len(PROMPT), sampling, arrival_s=1.0)


def opened(book: Ledger, **options: Any) -> Entry:
    """An entry whose first attempt runs on worker w."""
    entry = book.open(0.0, request(**options))
    assert book.submit(entry.request_id) == [SubmitAttempt(entry)]
    book.submitted(0.0, entry.request_id)
    book.placed(0.0, Placed(Attempt(entry.request_id, 0), ["w"], 0.5, "test"))
    return entry


def update(position: int, tokens: list[int], *, attempt: int = 0, **more: Any) -> TokenUpdate:
    return TokenUpdate(Attempt("r", attempt), position, tokens, **more)


def test_tokens_are_delivered_in_order_and_the_last_one_ends_it() -> None:
    book = ledger()
    entry = opened(book, max_tokens=3)
    assert book.tokens(1.0, "w", update(3, [10, 11])) == [Deliver(entry, [10, 11], [])]
    assert book.tokens(2.0, "w", update(5, [12], finish=FinishReason.LENGTH)) == [
        Deliver(entry, [12], [], FinishReason.LENGTH)
    ]
    assert len(book) == 0
    assert (entry.first_token_s, entry.last_token_s, entry.output) == (1.0, 2.0, [10, 11, 12])


@pytest.mark.parametrize("tokens", [[10], [10, 11, 12]])
def test_the_short_way_of_the_next_tokens_equals_the_long_way(tokens: list[int]) -> None:
    """The same entry, update for update, whether or not an update has what sends it the long way."""
    entries = []
    for times in (None, StageTimes("w")):
        book = ledger()
        entry = opened(book, max_tokens=9, stop=(END,))
        book.tokens(1.0, "w", update(3, [10]))
        said = update(4, tokens, times=times)
        delivered = Deliver(entry, tokens, [])
        if times is None:
            assert book.next_tokens(2.0, "w", said) == delivered
        else:
            assert book.next_tokens(2.0, "w", said) is None
            assert book.tokens(2.0, "w", said) == [delivered]
        entry.times.clear()
        entries.append(entry)
    assert entries[0] == entries[1]


def test_known_positions_are_dropped() -> None:
    book = ledger()
    entry = opened(book)
    book.tokens(1.0, "w", update(3, [10, 11]))
    assert book.tokens(1.0, "w", update(3, [10, 11])) == []
    assert book.tokens(1.0, "w", update(4, [11, 12])) == [Deliver(entry, [12], [])]
    assert book.dropped_tokens_total == 3


def test_tokens_of_an_older_attempt_are_dropped_and_their_sender_is_stopped() -> None:
    book = ledger()
    opened(book)
    book.attempts_lost(1.0, [Attempt("r", 0)], "worker dead")
    assert book.tokens(1.0, "w", update(3, [10])) == [CancelAttempt(Attempt("r", 0), ("w",), "superseded")]


def test_a_lost_attempt_is_resubmitted_with_its_tokens() -> None:
    book = ledger()
    entry = opened(book)
    entry.prediction = Prediction(4, 4, 4, 4)
    book.tokens(1.0, "w", update(3, [10, 11]))
    assert book.attempts_lost(2.0, [Attempt("r", 0)], "worker dead") == [
        CancelAttempt(Attempt("r", 0), ("w",), "worker dead"),
        SubmitAttempt(entry),
    ]
    now = entry.current(2.0)
    assert (now.attempt.number, now.tokens, now.prompt_tokens, now.output_known) == (1, [*PROMPT, 10, 11], 3, 2)
    assert now.prediction == Prediction(4, 4, 4, 4)
    assert now.waited_s == 2.0  # it keeps its place in line
    assert book.attempts_lost(2.0, [Attempt("r", 0)], "again") == []
    assert book.outstanding() == []  # not handed over yet
    book.submitted(2.0, "r")
    assert book.outstanding() == [Attempt("r", 1)]


def test_an_attempt_that_no_worker_holds_goes_on_while_its_tokens_still_come() -> None:
    """They have been computed, and this gateway is behind with them."""
    book = ledger()
    entry = opened(book)
    lost = [Attempt("r", 0)]
    book.tokens(7.0, "w", update(3, [10, 11]))
    assert book.attempts_lost(7.9, lost, "unknown", unheld=True) == []
    assert book.tokens(7.9, "w", update(5, [12])) == [Deliver(entry, [12], [])]
    assert book.attempts_lost(8.5, lost, "unknown", unheld=True) == []
    assert book.attempts_lost(8.9, lost, "unknown", unheld=True)[-1] == SubmitAttempt(entry)


def test_an_attempt_that_no_worker_holds_and_that_has_no_token_is_resubmitted_at_once() -> None:
    book = ledger()
    entry = opened(book)
    assert book.attempts_lost(0.1, [Attempt("r", 0)], "unknown", unheld=True)[-1] == SubmitAttempt(entry)


def test_a_lost_attempt_of_a_request_that_is_over_is_cancelled() -> None:
    """The manager lets nothing overtake what it expects to come again."""
    (action,) = ledger().attempts_lost(1.0, [Attempt("over", 2)], "worker dead")
    assert action == CancelAttempt(Attempt("over", 2), (), "unknown request")


def test_a_gap_asks_for_another_attempt() -> None:
    book = ledger()
    entry = opened(book)
    assert book.tokens(1.0, "w", update(4, [11]))[-1] == SubmitAttempt(entry)
    assert entry.output == []
    assert entry.lost_because == "tokens 3 to 4 never arrived"


def test_a_lost_last_word_needs_no_other_attempt() -> None:
    """All tokens arrived, the word that it ended did not: then the worker died."""
    book = ledger()
    entry = opened(book, max_tokens=9, stop=(END,))
    # A worker that says nothing of the end is not needed for it.
    assert book.tokens(1.0, "w", update(3, [10, END])) == [Deliver(entry, [10, END], [], FinishReason.STOP)]


def test_more_tokens_than_asked_for_never_reach_the_client() -> None:
    book = ledger()
    entry = opened(book, max_tokens=2)
    assert book.tokens(1.0, "w", update(3, [10, 11, 12])) == [Deliver(entry, [10, 11], [], FinishReason.LENGTH)]


def test_an_end_before_known_tokens_is_not_believed() -> None:
    book = ledger()
    entry = opened(book)
    book.tokens(1.0, "w", update(3, [10, 11]))
    assert book.tokens(1.0, "w", update(4, [], finish=FinishReason.STOP))[-1] == SubmitAttempt(entry)


def test_no_tokens_at_all_are_delivered_at_once() -> None:
    book = ledger()
    entry = book.open(0.0, request(max_tokens=0))
    assert book.submit("r") == [Deliver(entry, [], [], FinishReason.LENGTH)]


def test_a_failure_on_a_worker_ends_the_request_and_frees_it() -> None:
    book = ledger()
    entry = opened(book)
    cancel, fail = book.tokens(1.0, "w", update(3, [], finish=FinishReason.FAILED, error="no such luck"))
    assert isinstance(cancel, CancelAttempt) and isinstance(fail, Fail)
    assert (fail.entry, fail.error.status) == (entry, 500)
    assert "no such luck" in fail.error.message
    assert len(book) == 0


def test_a_failure_that_the_request_itself_causes_is_the_clients() -> None:
    book = ledger()
    opened(book)
    ended = update(3, [], finish=FinishReason.FAILED, error="too dear", is_clients=True)
    cancel, fail = book.tokens(1.0, "w", ended)
    assert isinstance(cancel, CancelAttempt) and isinstance(fail, Fail)
    assert (fail.error.status, fail.error.type_, fail.error.param) == (400, "invalid_request_error", "grammar")
    assert "too dear" in fail.error.message and len(book) == 0


def test_an_unrequested_cancel_is_a_loss() -> None:
    book = ledger()
    entry = opened(book)
    assert book.tokens(1.0, "w", update(3, [], finish=FinishReason.CANCELLED))[-1] == SubmitAttempt(entry)


def test_too_many_attempts_end_with_503() -> None:
    book = ledger(max_attempts=2)
    entry = opened(book)
    book.attempts_lost(1.0, [Attempt("r", 0)], "dead")
    book.submitted(1.0, "r")
    *_, fail = book.attempts_lost(2.0, [Attempt("r", 1)], "dead again")
    assert isinstance(fail, Fail) and fail.entry is entry
    assert (fail.error.status, "dead again" in fail.error.message) == (503, True)


def test_refused_becomes_the_clients_error() -> None:
    book = ledger()
    entry = opened(book)
    *_, fail = book.refused(Refused(Attempt("r", 0), 400, "too long for any worker"))
    assert isinstance(fail, Fail)
    assert (fail.entry, fail.error.status, fail.error.message) == (entry, 400, "too long for any worker")
    assert book.refused(Refused(Attempt("r", 0), 400, "twice")) == []


@pytest.mark.parametrize(("said_s", "told_s"), [(0.0, 1.0), (3.5, 3.5), (1e6, 120.0)])
def test_a_refusal_by_forecast_says_when_to_come_again_and_why(said_s: float, told_s: float) -> None:
    book = ledger()
    book.open(0.0, msgspec.structs.replace(request(), slo=Slo(ttft_s=2.0)))
    book.submitted(0.0, "r")
    *_, fail = book.refused(Refused(Attempt("r", 0), 429, "busy", "infeasible", said_s, 5.25))
    assert isinstance(fail, Fail)
    assert (fail.error.status, fail.error.type_, fail.error.retry_after_s) == (429, "rate_limit_error", told_s)
    assert "5.25 s" in fail.error.message and "2 s" in fail.error.message
    assert (fail.entry.refused_because, fail.entry.forecast_s) == ("infeasible", 5.25)


def test_all_choices_of_a_request_are_refused_with_one() -> None:
    """One of them waits at the manager, one runs, one has ended."""
    book, names = ledger(), ("a", "b", "c")
    entries = [book.open(0.0, request(name, max_tokens=1 if name == "c" else 5), together=names) for name in names]
    other = opened(book)
    for name in names:
        book.submitted(0.0, name)
    for name in ("b", "c"):
        book.placed(0.0, Placed(Attempt(name, 0), ["w"], 0.0, "test"))
    book.tokens(0.1, "w", TokenUpdate(Attempt("c", 0), 3, [10]))
    actions = book.refused(Refused(Attempt("a", 0), 429, "busy", "infeasible", 2.0))
    failed = [action for action in actions if isinstance(action, Fail)]
    assert [fail.entry for fail in failed] == entries[:2]
    assert len({id(fail.error) for fail in failed}) == 1
    cancelled = [(action.attempt, action.holders) for action in actions if isinstance(action, CancelAttempt)]
    assert cancelled == [(Attempt("a", 0), ()), (Attempt("b", 0), ("w",))]
    assert list(book.entries()) == [other]
    book.check()


def test_what_was_demoted_stays_best_effort_when_it_is_lost() -> None:
    book = ledger()
    entry = book.open(0.0, msgspec.structs.replace(request(), slo=Slo(ttft_s=2.0, tpot_s=0.1)))
    book.submitted(0.0, "r")
    book.placed(0.0, Placed(Attempt("r", 0), ["w"], 0.0, "test", True, 4.0))
    assert (entry.best_effort, entry.forecast_s) == (True, 4.0)
    book.attempts_lost(1.0, [Attempt("r", 0)], "dead")
    again = entry.current(1.0)
    assert (again.traffic_class, again.slo, entry.request.slo.ttft_s) == ("be", Slo(), 2.0)


def test_displaced_requests_are_submitted_in_the_order_they_came() -> None:
    book = ledger()
    for name, arrival_s in (("late", 3.0), ("early", 1.0)):
        book.open(0.0, msgspec.structs.replace(request(name), arrival_s=arrival_s))
        book.submitted(0.0, name)
    attempts = [Attempt("late", 0), Attempt("early", 0), Attempt("late", 0)]
    again = [action for action in book.attempts_lost(1.0, attempts, "dead") if isinstance(action, SubmitAttempt)]
    assert [action.entry.attempt for action in again] == [Attempt("early", 1), Attempt("late", 1)]


def test_another_manager_takes_over_only_waiting_requests() -> None:
    book = ledger()
    running = opened(book)
    waiting = book.open(0.0, request("w"))
    book.submitted(0.0, "w")
    book.open(0.0, request("o"))
    assert book.manager_replaced(1.0) == [
        CancelAttempt(Attempt("w", 0), (), "the manager was replaced while the request waited"),
        SubmitAttempt(waiting),
    ]
    assert (running.attempt.number, waiting.attempt.number, waiting.lost_kind) == (0, 1, "manager")
    assert book.outstanding() == [Attempt("r", 0)]


def test_managers_that_are_replaced_one_after_the_other_use_up_no_attempts() -> None:
    book = ledger(max_attempts=2)
    entry = book.open(0.0, request())
    for number in range(5):
        book.submitted(0.0, "r")
        book.manager_replaced(0.0)
        assert (entry.attempt.number, entry.state) == (number + 1, State.OPEN)
    book.submitted(0.0, "r")
    assert book.attempts_lost(0.0, [entry.attempt], "dead")[-1] == SubmitAttempt(entry)
    book.submitted(0.0, "r")
    failed = book.attempts_lost(0.0, [entry.attempt], "dead")[-1]
    assert isinstance(failed, Fail) and "placed 2 times" in failed.error.message


def test_an_undelivered_attempt_is_unsubmitted_again() -> None:
    book = ledger()
    entry = book.open(0.0, request())
    book.submitted(0.0, "r")
    book.undelivered(Attempt("r", 1))  # not this one
    assert book.unsubmitted() == []
    book.undelivered(Attempt("r", 0))
    assert book.unsubmitted() == [entry]
    book.submitted(0.0, "r")
    book.placed(0.0, Placed(Attempt("r", 0), ["w"], 0.0, "test"))
    book.undelivered(Attempt("r", 0))
    assert entry.state is State.PLACED


def test_counters_that_disagree_with_the_entries_are_found() -> None:
    for counter in ("waiting_requests", "waiting_online", "waiting_tokens"):
        book = ledger()
        book.open(0.0, request())
        book.check()
        setattr(book, counter, getattr(book, counter) + 1)
        with pytest.raises(InvariantViolated):
            book.check()


def test_a_stalled_attempt_is_replaced_but_a_queue_is_no_stall() -> None:
    book = ledger()
    entry = book.open(0.0, request())
    book.submitted(0.0, "r")
    assert book.tick(50.0) == []  # not placed: it waits for its turn
    book.placed(50.0, Placed(Attempt("r", 0), ["w"], 50.0, "test"))
    assert book.tick(59.9) == []
    book.tokens(59.9, "w", update(3, [10]))
    assert book.tick(69.8) == []
    assert book.tick(69.9) == [CancelAttempt(Attempt("r", 0), ("w",), "no token for 10 s"), SubmitAttempt(entry)]


def test_a_request_past_its_time_fails_wherever_it_is() -> None:
    book = ledger()
    book.open(0.0, request())
    *_, fail = book.tick(100.0)
    assert isinstance(fail, Fail) and fail.error.status == 504


def test_closing_frees_everywhere_and_later_tokens_stop_their_sender() -> None:
    book = ledger()
    opened(book)
    book.tokens(1.0, "d", update(3, [10]))
    assert book.close("r", "enough") == [CancelAttempt(Attempt("r", 0), ("d", "w"), "enough")]
    assert book.close("r", "enough") == []
    assert book.tokens(1.0, "d", update(4, [11])) == [CancelAttempt(Attempt("r", 0), ("d",), "unknown request")]
    assert book.tokens(1.0, "d", update(5, [], finish=FinishReason.CANCELLED)) == []
    assert book.placed(1.0, Placed(Attempt("r", 0), ["w"], 0.0, "late"))[0] == CancelAttempt(
        Attempt("r", 0), ("w",), "cancelled"
    )


def test_an_unsent_attempt_needs_no_cancel() -> None:
    book = ledger()
    book.open(0.0, request())
    assert book.close("r", "gone") == []


def test_logprobs_stay_beside_their_tokens_over_attempts() -> None:
    book = ledger()
    entry = opened(book, logprobs=0)
    one, two = TokenLogprob(-0.5), TokenLogprob(-0.7)
    book.tokens(1.0, "w", update(3, [10], logprobs=[one]))
    book.attempts_lost(1.0, [Attempt("r", 0)], "dead")
    assert book.tokens(2.0, "v", update(3, [10, 11], attempt=1, logprobs=[one, two])) == [Deliver(entry, [11], [two])]
    assert entry.logprobs == [one, two]
    *_, fail = book.tokens(3.0, "v", update(5, [12], attempt=1))
    assert isinstance(fail, Fail)  # an answer with holes in its log-probabilities would be a wrong one


def test_waiting_counts_until_first_placed() -> None:
    book = ledger()
    book.open(0.0, request("a"), expected_output=4)
    book.open(0.0, request("b"), expected_output=4)
    assert (book.waiting_requests, book.waiting_tokens) == (2, 14)
    book.placed(0.0, Placed(Attempt("a", 0), ["w"], 0.0, "test"))
    assert (book.waiting_requests, book.waiting_tokens) == (1, 7)
    book.close("b", "gone")
    book.attempts_lost(0.0, [Attempt("a", 0)], "dead")
    assert (book.waiting_requests, book.waiting_tokens) == (0, 0)


def test_stage_times_up_to_the_first_token_are_summed() -> None:
    book = ledger()
    entry = opened(book)
    book.tokens(1.0, "w", update(3, [10], times=StageTimes("w", queue_s=1, prefill_s=2), cached_tokens=2))
    book.tokens(2.0, "d", update(4, [11], times=StageTimes("d", transfer_s=5)))
    assert entry.first_times == StageTimes(queue_s=1, prefill_s=2)
    assert (entry.cached_tokens, entry.bucket_s, entry.instances) == (2, 0.5, ["w", "d"])


def test_the_same_request_is_not_opened_twice() -> None:
    book = ledger()
    book.open(0.0, request())
    with pytest.raises(ValueError):
        book.open(0.0, request())


def test_ending_the_gateway_fails_all() -> None:
    book = ledger()
    opened(book)
    book.open(0.0, request("b"))
    errors = [
        action.entry.request_id for action in book.fail_all(RequestError("bye", status=503)) if isinstance(action, Fail)
    ]
    assert (sorted(errors), len(book)) == (["b", "r"], 0)


TRUTH = [10, 11, 12, 13, 14, 15, 16, END]


class ExactlyOnce(RuleBasedStateMachine):
    """Workers of any attempt send any part of the truth, again and out of order; losses strike at any time.
    The client's stream is the true sequence, once, whatever happens."""

    @initialize(stop=st.booleans(), max_tokens=st.integers(1, 10), scored=st.booleans())
    def begin(self, stop: bool, max_tokens: int, scored: bool) -> None:
        self.scored = scored
        self.book = ledger(max_attempts=1000)
        self.truth = (TRUTH if stop else [*TRUTH[:-1], 17, 18, 19])[:max_tokens]
        self.entry = self.book.open(0.0, request(max_tokens=max_tokens, stop=(END,), logprobs=0 if scored else -1))
        self.seen: list[int] = []
        self.finish: FinishReason | None = None
        self.now_s = 0.0
        self.perform(self.book.submit("r"))

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Deliver(_, tokens, logprobs, finish):
                    assert self.finish is None
                    assert [item.logprob for item in logprobs] == [-token / 10 for token in tokens if self.scored]
                    self.seen += tokens
                    self.finish = finish
                case SubmitAttempt(entry):
                    current = entry.current(self.now_s)
                    assert current.tokens == [*PROMPT, *self.seen]
                    self.book.submitted(self.now_s, "r")
                case Fail(_, error):
                    raise AssertionError(error.message)
                case CancelAttempt(held, _, _):
                    assert held.request_id == "r"
        self.book.check()

    @rule(
        attempt=st.integers(-3, 0),
        start=st.integers(0, 10),
        count=st.integers(0, 4),
        worker=st.sampled_from("wvx"),
        announce=st.booleans(),
    )
    def tokens_arrive(self, attempt: int, start: int, count: int, worker: str, announce: bool) -> None:
        start = min(start, len(self.truth))
        tokens = self.truth[start : start + count]
        ends = start + len(tokens) == len(self.truth) and announce
        reason = FinishReason.STOP if self.truth[-1] == END else FinishReason.LENGTH
        self.now_s += 1
        self.perform(
            self.book.tokens(
                self.now_s,
                worker,
                TokenUpdate(
                    Attempt("r", max(0, self.entry.attempt.number + attempt)),
                    len(PROMPT) + start,
                    tokens,
                    logprobs=[TokenLogprob(-token / 10) for token in tokens if self.scored],
                    finish=reason if ends else None,
                ),
            )
        )

    @rule(attempt=st.integers(-1, 0))
    def attempts_lost(self, attempt: int) -> None:
        self.perform(self.book.attempts_lost(self.now_s, [Attempt("r", self.entry.attempt.number + attempt)], "dead"))

    @rule(seconds=st.floats(0, 0.5))
    def time_passes(self, seconds: float) -> None:
        self.now_s += seconds
        self.entry.expires_s = self.now_s + 100  # only stalls are of interest here
        self.perform(self.book.tick(self.now_s))

    @rule(workers=st.lists(st.sampled_from("wvx"), max_size=2))
    def placed(self, workers: list[str]) -> None:
        self.perform(self.book.placed(self.now_s, Placed(self.entry.attempt, workers, 0.0, "test")))

    @precondition(lambda self: self.finish is None)
    @rule()
    def the_rest_arrives(self) -> None:
        """From any state the current attempt can still complete the stream."""
        start = len(self.seen)
        self.tokens_arrive(0, start, len(self.truth), "w", True)
        assert self.finish is not None

    @invariant()
    def the_stream_is_a_prefix_of_the_truth(self) -> None:
        if hasattr(self, "truth"):
            assert self.seen == self.truth[: len(self.seen)]
            if self.finish is not None:
                assert self.seen == self.truth
                assert (len(self.book), self.book.waiting_requests, self.book.waiting_tokens) == (0, 0, 0)
            else:
                assert self.entry.state in State


TestExactlyOnce = ExactlyOnce.TestCase
TestExactlyOnce.settings = settings(max_examples=examples(1), stateful_step_count=25)
