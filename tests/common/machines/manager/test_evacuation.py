"""What a draining worker has goes on elsewhere: which of it, where, and in what words."""

from __future__ import annotations

from cohort.common.machines.manager.dispatcher import Evacuation
from cohort.common.machines.manager.roster import ManagedAttempt, Roster
from cohort.common.messages import BindSegment, Message, RegisterWorker, WorkerReport
from cohort.common.policies.interface import WaitingRequest
from cohort.common.types import Attempt, InstanceId, Request, Role, SamplingParams, Segment, WorkerCapacity, WorkerStats

CAPACITY = WorkerCapacity(Role.UNIFIED, "m", 1000, 1, 1, 1, 1, 16, 100, 0, 64, 512)
PROMPT = 300


class Drained:
    """Worker u drains, with these requests; worker v has `free_blocks` of 16 positions. Remembers what is said."""

    def __init__(self, *names: str, free_blocks: int) -> None:
        self.roster = Roster(report_timeout_s=3.0)
        self.said: list[tuple[InstanceId, Message]] = []
        self.started: list[tuple[Attempt, tuple[Segment, ...], int]] = []
        self.vacating = Evacuation(self.roster, lambda peer, it: self.said.append((peer, it)), self.start, True)
        for name, free in (("u", 0), ("v", free_blocks)):
            self.roster.register_worker(0.0, RegisterWorker(name, 1, f"at-{name}", CAPACITY, []))
            stats = WorkerStats(free_blocks=free)
            self.roster.read_report(0.0, WorkerReport(name, 1, 1, stats, [], draining=name == "u"))
        for name in names:
            request = Request(Attempt(name, 0), "g", [1] * PROMPT, PROMPT, SamplingParams(max_tokens=50), 0.0)
            managed = ManagedAttempt(
                request.attempt, "g", WaitingRequest(request, 0.0, None), segments=(Segment(0, None, "u"),)
            )
            self.roster.add(managed)
            self.roster.assign(0.0, managed, "u")

    def start(self, now_s: float, managed: ManagedAttempt, item: WaitingRequest, index: int, batch_id: int) -> None:
        self.started.append((managed.attempt, managed.segments, index))
        self.roster.assign(now_s, managed, "v")

    def moved(self) -> list[str]:
        self.vacating.reported(1.0, "u")
        return [attempt.request_id for attempt, _, _ in self.started]


def test_a_request_goes_on_where_the_blocks_are() -> None:
    drained = Drained("a", free_blocks=100)
    assert drained.moved() == ["a"]
    following = Segment(PROMPT, None, "v")
    assert drained.started == [(Attempt("a", 0), (Segment(0, PROMPT, "u"), following), 1)]
    assert drained.said == [("u", BindSegment(Attempt("a", 0), following, "at-v"))]
    assert drained.moved() == ["a"], "once"


def test_what_was_sent_to_a_worker_counts_before_it_reports_it() -> None:
    """It has blocks for one of three, and its report says so still when the second is looked at."""
    assert Drained("a", "b", "c", free_blocks=30).moved() == ["a"]


def test_a_parked_request_is_left_to_late_binding() -> None:
    drained = Drained("a", "b", free_blocks=100)
    drained.roster.requests["a"].parked_at = "u"
    assert drained.moved() == ["b"]
