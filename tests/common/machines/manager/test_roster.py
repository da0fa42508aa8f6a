"""The manager's books: what follows from them follows from the messages alone, not from how strings hash."""

from __future__ import annotations

from cohort.common.machines.manager.roster import ManagedAttempt, Roster
from cohort.common.messages import RegisterWorker, WorkerReport
from cohort.common.types import Attempt, Role, WorkerCapacity, WorkerStats

CAPACITY = WorkerCapacity(Role.UNIFIED, "m", 1000, 1, 1, 1, 1, 16, 100, 0, 64, 512)


def test_attempts_without_an_owner_come_in_the_order_their_worker_named_them() -> None:
    """In which order they are cancelled: a replay in another process must say the same."""
    first = [Attempt(f"r{number}", 1) for number in range(20)]
    later = [Attempt(f"s{number}", 1) for number in range(20)]
    roster = Roster(report_timeout_s=3.0)
    roster.register_worker(0.0, RegisterWorker("u", 1, "at-u", CAPACITY, first))
    assert roster.read_report(0.1, WorkerReport("u", 1, 1, WorkerStats(), [*first, *later])) == []
    assert roster.take_stale_unclaimed(10.0) == [(attempt, ["u"]) for attempt in [*first, *later]]


def test_attempts_that_a_worker_no_longer_names_are_missed_in_an_order_of_their_own() -> None:
    attempts = [Attempt(f"r{number:02}", 1) for number in range(20)]
    roster = Roster(report_timeout_s=3.0)
    roster.register_worker(0.0, RegisterWorker("u", 1, "at-u", CAPACITY, []))
    for attempt in attempts:
        managed = ManagedAttempt(attempt, "gateway")
        roster.add(managed)
        roster.assign(0.0, managed, "u")
    assert roster.read_report(0.1, WorkerReport("u", 1, 1, WorkerStats(), attempts[::-1])) == []
    missing = roster.read_report(10.0, WorkerReport("u", 1, 2, WorkerStats(), []))
    assert missing is not None and [managed.attempt for managed in missing] == attempts


def test_a_worker_without_work_may_be_silent_for_as_long_as_it_announced() -> None:
    roster = Roster(report_timeout_s=3.0)
    roster.register_worker(0.0, RegisterWorker("u", 1, "at-u", CAPACITY, []))
    assert roster.read_report(1.0, WorkerReport("u", 1, 1, WorkerStats(), [], quiet_s=5.0)) == []
    assert roster.silent_workers(9.0) == [] and roster.workers["u"].view.report_age_s == 3.0
    assert roster.silent_workers(9.5) == [("u", 3.5)]
    assert roster.silent_workers(5.0) == [] and roster.workers["u"].view.report_age_s == 0.0
    roster.register_worker(10.0, RegisterWorker("u", 1, "at-u", CAPACITY, [], quiet_s=5.0))  # with one that stands by
    assert roster.silent_workers(18.0) == []


def test_a_worker_that_gets_work_is_to_report_as_usual() -> None:
    roster = Roster(report_timeout_s=3.0)
    roster.register_worker(0.0, RegisterWorker("u", 1, "at-u", CAPACITY, []))
    roster.read_report(1.0, WorkerReport("u", 1, 1, WorkerStats(), [], quiet_s=5.0))
    managed = ManagedAttempt(Attempt("r", 1), "gateway")
    roster.add(managed)
    roster.assign(2.0, managed, "u")
    assert roster.silent_workers(5.5) == [("u", 3.5)]
    roster.read_report(2.5, WorkerReport("u", 1, 2, WorkerStats(), [], quiet_s=5.0))  # sent before it got it
    assert roster.silent_workers(5.6) == [("u", 5.6 - 2.5)]
