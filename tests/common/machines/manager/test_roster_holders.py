"""Who holds what is known from what came and went as from everything, whatever is lost on the way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cohort.common.machines.manager.roster import ManagedAttempt, Roster
from cohort.common.messages import RegisterWorker, WorkerReport
from cohort.common.types import Attempt, WorkerStats
from tests.common.machines.manager.test_roster import CAPACITY

WORKERS = ("u", "v", "w")
ATTEMPTS = [Attempt(f"r{number}", 0) for number in range(4)]
WORKER, ATTEMPT = st.sampled_from(WORKERS), st.sampled_from(ATTEMPTS)
HELD = st.sets(ATTEMPT)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("reports"), WORKER, HELD, HELD, st.sampled_from(["arrives", "arrives", "arrives", "lost"])),
        st.tuples(st.sampled_from(["registers", "lost"]), WORKER, HELD, HELD),
        st.tuples(st.sampled_from(["placed", "ended", "over"]), WORKER, ATTEMPT),
    ),
    max_size=40,
)


class _Sender:
    """A worker's reports: every fifth names everything, the others what came and went."""

    def __init__(self, name: str) -> None:
        self.name, self.number = name, 0
        self.told: set[Attempt] | None = None

    def report(self, held: set[Attempt], awaiting: set[Attempt]) -> WorkerReport:
        self.number += 1
        told, self.told = self.told, held | awaiting
        if told is None or self.number % 5 == 0:
            return WorkerReport(self.name, 1, self.number, WorkerStats(), sorted(held - awaiting), sorted(awaiting))
        came, gone = sorted(self.told - told), sorted(told - self.told)
        stats, since = WorkerStats(), self.number - 1
        return WorkerReport(self.name, 1, self.number, stats, came, sorted(awaiting), since=since, gone=gone)


@given(STEPS)
def test_changes_add_up_to_what_is_held(steps: list[tuple[object, ...]]) -> None:
    roster, now_s = Roster(report_timeout_s=3.0), 0.0
    senders = {name: _Sender(name) for name in WORKERS}
    in_order: dict[str, bool] = {}  # whether no report was lost since the last whole one
    last: dict[str, tuple[set[Attempt], set[Attempt]]] = {}

    def register(name: str, held: set[Attempt], awaiting: set[Attempt]) -> None:
        message = RegisterWorker(name, 1, f"at-{name}", CAPACITY, sorted(held - awaiting), sorted(awaiting))
        roster.register_worker(now_s, message)
        senders[name].told, last[name], in_order[name] = None, (held | awaiting, awaiting), True

    for name in WORKERS:
        register(name, set(), set())
    for step in steps:
        now_s += 0.2
        match step:
            case ("reports", str(name), set(held), set(awaiting), fate) if name in roster.workers:
                report = senders[name].report(held, awaiting)
                if fate == "lost":
                    in_order[name] = False
                else:
                    assert roster.read_report(now_s, report) is not None
                    in_order[name] |= not report.since
                    if in_order[name]:
                        last[name] = held | awaiting, awaiting
            case ("registers", str(name), set(held), set(awaiting)):
                register(name, held, awaiting)
            case ("lost", str(name), _, _) if name in roster.workers:
                for managed in roster.remove_worker(name):
                    if not managed.live:
                        roster.remove(managed)
            case ("placed", str(name), Attempt() as attempt) if name in roster.workers:
                if attempt.request_id not in roster.requests:
                    managed = ManagedAttempt(attempt, "gateway")
                    roster.add(managed)
                    roster.assign(now_s, managed, name)
            case ("ended" | "over" as what, str(name), Attempt() as attempt):
                known = roster.requests.get(attempt.request_id)
                if known is not None:
                    roster.unassign(known, name)
                    if what == "over" or not known.live:
                        roster.remove(known)
        roster.check()
        for name, worker in roster.workers.items():
            assert (worker.held, worker.awaiting) == last[name]
        for attempt in ATTEMPTS:
            holders = [name for name, worker in roster.workers.items() if attempt in worker.held]
            some = any(attempt not in roster.workers[name].awaiting for name in holders)
            assert sorted(roster.computing(attempt)) == (sorted(holders) if some else [])
