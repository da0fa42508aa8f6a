"""Words of attempts and processes that are over: what a gateway's ledger and a manager make of them."""

from __future__ import annotations

from cohort.common.machines.effects import Deliver
from cohort.common.machines.events import Received
from cohort.common.machines.gateway.ledger import CancelAttempt
from cohort.common.messages import ManagerHello, Placed, SegmentEnded, Submit, WorkerReport
from cohort.common.types import Attempt, Outcome, WorkerStats
from tests.common.machines.gateway.test_ledger import END, ledger, opened, update
from tests.common.machines.manager import test_manager_machine as managers

# -- the ledger -----------------------------------------------------------------------------------------------------


def test_the_short_way_leaves_whatever_is_not_simply_next_to_the_long_one() -> None:
    book = ledger()
    opened(book, max_tokens=5, stop=(END,))
    book.tokens(1.0, "w", update(3, [10]))
    assert book.next_tokens(1.0, "w", update(3, [10])) is None, "known"
    assert book.next_tokens(1.0, "w", update(5, [12])) is None, "behind a gap"
    assert book.next_tokens(1.0, "w", update(4, [11, END])) is None, "a stop token"
    assert book.next_tokens(1.0, "w", update(4, [11, 12, 13, 14])) is None, "the last ones"
    assert book.next_tokens(1.0, "x", update(4, [11])) is None, "of a worker that was not known to have it"


def test_an_older_attempt_that_goes_on_beside_its_successor_on_the_same_worker_is_stopped() -> None:
    book = ledger()
    entry = opened(book)
    book.tokens(1.0, "w", update(3, [10]))
    book.attempts_lost(1.0, [Attempt("r", 0)], "its transfer failed")
    book.submitted(1.0, "r")
    book.placed(1.1, Placed(Attempt("r", 1), ["w"], 0.1, "test"))
    assert book.tokens(1.2, "w", update(4, [11], attempt=1)) == [Deliver(entry, [11], [])]
    assert book.next_tokens(1.3, "w", update(5, [12])) is None
    assert book.tokens(1.3, "w", update(5, [12])) == [CancelAttempt(Attempt("r", 0), ("w",), "superseded")]


def test_only_workers_of_the_current_attempt_are_told_of_its_end() -> None:
    book = ledger()
    opened(book)
    book.attempts_lost(1.0, [Attempt("r", 0)], "worker dead")
    book.submitted(1.0, "r")
    book.placed(1.1, Placed(Attempt("r", 1), ["x"], 0.1, "test"))
    assert book.close("r", "client left") == [CancelAttempt(Attempt("r", 1), ("x",), "client left")]


# -- the manager ----------------------------------------------------------------------------------------------------


def test_the_end_of_a_former_attempt_is_not_that_of_the_current_one() -> None:
    found = managers.ready()
    found.handle(0.1, managers.from_gateway(Submit(managers.request("a", number=2))))
    for outcome in (Outcome.FINISHED, Outcome.FAILED, Outcome.CANCELLED):
        assert found.handle(0.2, Received("u", SegmentEnded("u", Attempt("a", 1), outcome, 8))) == []
    assert found.live == 1
    found.check()


def test_a_report_of_another_process_of_that_name_says_nothing_of_this_one() -> None:
    """Sent before it restarted, or after, by one that has not registered: it holds nothing of what runs here."""
    found = managers.placed()
    other = Received("u", WorkerReport("u", 2, 1, WorkerStats(), []))
    assert managers.sends(found.handle(2.9, other)) == [("u", ManagerHello(7))]
    assert found.live == 1
