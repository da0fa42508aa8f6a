"""The manager's memory: which gateways and workers are there, and which attempt is where.

    gateway says outstanding ──┐                       ┌── worker says held, awaiting
                               ▼                       ▼
                 requests: attempt ── live on ──▶ workers: live, held, fresh
                               │
        in requests  = claimed │ held by a worker, in no request = unclaimed, since when

Called by `ManagerMachine` alone. Answers which attempts are lost with a worker, and which are held although no gateway
claims them. Sends nothing, decides nothing about a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from cohort.common.errors import InvariantViolated
from cohort.common.messages import GatewayHello, RegisterWorker, WorkerReport
from cohort.common.policies.interface import InstanceView, WaitingRequest
from cohort.common.policies.serving_views import ServingViews
from cohort.common.types import Attempt, InstanceId, RequestId, Segment

_HOLD_GRACE_S = 2.0
"""Time in which a worker's report may miss what was sent to it."""
_FINISHED_GRACE_S = 5.0
"""Time that a finished request's last tokens may need to its gateway: they travel on another connection."""
_REMEMBERED_S = 30.0
"""Time for which the end of an attempt is stored: a gateway that still waits for its tokens has not lost it."""
RESUBMIT_S = 0.1
"""Maximum time that placements wait for lost attempts to come again: far longer than the round trip."""
_NOTICE_S = 1.5
"""Time for which a first notice counts as delivered; it doubles with every repetition. Gateways list their attempts
every second, so a lost notice is repeated after the second list."""
_LONGEST_S = 12.0
_LOST_REMEMBERED_S = 60.0
"""Time since the last notice, more than `_LONGEST_S`. An attempt named after it counts as lost anew."""


@dataclass(slots=True)
class Gateway:
    incarnation: int
    endpoint: str
    last_seen_s: float


@dataclass(slots=True)
class Worker:
    incarnation: int
    endpoint: str
    view: InstanceView
    last_report_s: float
    held: set[Attempt] = field(default_factory=set)
    """Attempts that it holds, by its registration and the reports since."""
    awaiting: set[Attempt] = field(default_factory=set)
    """Attempts among `held` whose KV has not arrived yet."""
    live: dict[RequestId, Managed] = field(default_factory=dict)
    """Mirror of `Managed.live`."""
    attempts: set[Attempt] = field(default_factory=set)
    unheld: dict[Attempt, None] = field(default_factory=dict)
    """Attempts in `attempts` that the worker has not named yet, or names no longer."""
    order: int = 0
    """Place of its first registration among all workers'."""
    report: int = 0
    """Number of the last report that was used; 0 = none since it registered."""
    idle: bool = False
    """Whether a request in `live` may have `idle_since_s` set."""
    fresh: dict[RequestId, tuple[int, int, str]] = field(default_factory=dict)
    """Prefill tokens, context tokens and adapter of requests that were sent to it and are in no report yet."""

    def add_fresh(self, request_id: RequestId, load: tuple[int, int, str]) -> None:
        """Add a request sent to it. Its load is added, not summed anew: thousands may be under way."""
        again = request_id in self.fresh
        self.fresh[request_id] = load
        if again:
            self.count_fresh()
            return
        prefill, context, adapter = load
        view = self.view
        view.assigned_requests += 1
        view.assigned_prefill_tokens += prefill
        view.assigned_context_tokens += context
        if adapter:
            view.assigned_adapters |= {adapter}

    def count_fresh(self) -> None:
        """Count work that was sent to the worker but is not in its last report as load."""
        self.view.assigned_requests = len(self.fresh)
        self.view.assigned_prefill_tokens = sum(prefill for prefill, _, _ in self.fresh.values())
        self.view.assigned_context_tokens = sum(context for _, context, _ in self.fresh.values())
        self.view.assigned_adapters = frozenset([adapter for _, _, adapter in self.fresh.values() if adapter])


@dataclass(slots=True, eq=False)
class Managed:
    """Live attempt. `item`: its request as the policies see it, None for one adopted from workers after a restart.
    `live`: instances whose segment has not ended, and since when they are expected to hold it."""

    attempt: Attempt
    gateway: InstanceId
    item: WaitingRequest | None = None
    waiting: bool = False
    segments: tuple[Segment, ...] = ()
    live: dict[InstanceId, float] = field(default_factory=dict)
    parked_at: InstanceId = ""
    """Worker that reported it parked for late binding, with `parked_positions` computed."""
    parked_positions: int = 0
    idle_since_s: float | None = None
    """Time since which every worker that holds the attempt reports waiting for another worker, although the manager
    knows of none. None while one of them makes progress."""

    @property
    def request_id(self) -> RequestId:
        return self.attempt.request_id


class Roster:
    def __init__(self, report_timeout_s: float) -> None:
        self.gateways: dict[InstanceId, Gateway] = {}
        self.workers: dict[InstanceId, Worker] = {}
        self.requests: dict[RequestId, Managed] = {}
        self.expected: set[InstanceId] = set()
        """Workers that a gateway named when it greeted."""
        self._report_timeout_s = report_timeout_s
        self._views: ServingViews | None = None
        self._claimed: set[Attempt] = set()
        self._unclaimed: dict[Attempt, float] = {}
        """Attempts that a worker holds and no gateway claims, with the time since when, oldest first."""
        self._other_holders: dict[Attempt, list[InstanceId]] = {}
        """Workers that hold an attempt without being in its `live`: nearly always unclaimed, or just ended."""
        self._registrations = 0
        self._finished: deque[Attempt] = deque()
        self._finished_at_s: dict[Attempt, float] = {}

    # -- gateways ----------------------------------------------------------------------------------------------

    def register_gateway(self, now_s: float, hello: GatewayHello) -> bool:
        """Record a gateway. Return whether one of this name has restarted: its earlier requests are void."""
        known = self.gateways.get(hello.instance)
        self.gateways[hello.instance] = Gateway(hello.incarnation, hello.endpoint, now_s)
        self.expected.update(hello.workers)
        return known is not None and known.incarnation != hello.incarnation

    def touch_gateway(self, now_s: float, sender: InstanceId) -> bool:
        """Return False if this gateway has not greeted yet."""
        gateway = self.gateways.get(sender)
        if gateway is None:
            return False
        gateway.last_seen_s = now_s
        return True

    def silent_gateways(self, now_s: float) -> list[InstanceId]:
        return [name for name, it in self.gateways.items() if now_s - it.last_seen_s > self._report_timeout_s]

    def requests_of(self, gateway: InstanceId) -> list[Managed]:
        return [managed for managed in self.requests.values() if managed.gateway == gateway]

    # -- workers -----------------------------------------------------------------------------------------------

    def registered(self, now_s: float, message: RegisterWorker) -> None:
        known = self.workers.get(message.instance)
        assert known is None or known.incarnation == message.incarnation, f"{message.instance} was not removed before"
        view = InstanceView(message.instance, message.capacity)
        self._views = None
        self._registrations += 1
        worker = Worker(message.incarnation, message.endpoint, view, now_s, order=self._registrations)
        if known is not None:  # the same process once more: it keeps what it was given
            worker.live, worker.attempts, worker.idle = known.live, known.attempts, known.idle
            worker.held, worker.unheld, worker.order = known.held, known.unheld, known.order
            worker.fresh = known.fresh
        self.workers[message.instance] = worker
        worker.awaiting = set(message.awaiting)
        self._holds(message.instance, worker, {*message.held, *message.awaiting})
        worker.fresh = {name: load for name, load in worker.fresh.items() if worker.live[name].attempt in worker.unheld}
        worker.count_fresh()
        self._note_unclaimed(now_s, message.held, message.awaiting)

    def reported(self, now_s: float, report: WorkerReport) -> list[Managed] | None:
        """Return attempts that it should hold and does not, or that make no progress anywhere; None if this worker
        counts as dead or unknown. Costs what changed since the report before it, and once a second all that is held."""
        worker = self.workers.get(report.instance)
        if worker is None or worker.incarnation != report.incarnation:
            return None
        worker.last_report_s = now_s
        view = worker.view
        view.report_age_s = 0.0
        if view.draining is not report.draining:
            view.draining = report.draining
            self._views = None
        if report.since and report.since != worker.report:
            return []  # the one before it was lost: a sign of life
        worker.report = report.sequence
        view.stats = report.stats
        worker.awaiting = set(report.awaiting)
        if report.since:
            for attempt in report.gone:
                self._left(report.instance, worker, attempt)
            for attempt in (*report.held, *report.awaiting):
                self._add_holder(report.instance, worker, attempt)
        else:
            self._holds(report.instance, worker, {*report.held, *report.awaiting})
        missing = self._missing(now_s, report.instance, worker)
        if worker.fresh:
            fresh, unheld, live = worker.fresh, worker.unheld, worker.live
            worker.fresh = {name: fresh[name] for name in fresh if live[name].attempt in unheld} if unheld else {}
            worker.count_fresh()
        self._touched(report.instance)
        if report.since or self._unclaimed or not worker.held <= self._claimed:  # sets of known hashes
            self._note_unclaimed(now_s, report.held, report.awaiting)
        return missing

    def _holds(self, instance: InstanceId, worker: Worker, held: set[Attempt]) -> None:
        for attempt in sorted(worker.held - held):  # `unheld` keeps this order, and a set's differs by process
            self._left(instance, worker, attempt)
        for attempt in held - worker.held:
            self._add_holder(instance, worker, attempt)

    def _add_holder(self, instance: InstanceId, worker: Worker, attempt: Attempt) -> None:
        if attempt in worker.held:
            return
        worker.held.add(attempt)
        if attempt in worker.attempts:
            worker.unheld.pop(attempt, None)
        else:
            self._other_holders.setdefault(attempt, []).append(instance)

    def _left(self, instance: InstanceId, worker: Worker, attempt: Attempt) -> None:
        worker.held.discard(attempt)
        if attempt in worker.attempts:
            worker.unheld[attempt] = None
        else:
            self._remove_holder(attempt, instance)

    def _remove_holder(self, attempt: Attempt, instance: InstanceId) -> None:
        """Remove a worker from an attempt's other holders: it dropped the attempt, or runs it now."""
        holders = self._other_holders.get(attempt)
        if holders is not None and instance in holders:
            holders.remove(instance)
            if not holders:
                del self._other_holders[attempt]
                self._unclaimed.pop(attempt, None)

    def _missing(self, now_s: float, instance: InstanceId, worker: Worker) -> list[Managed]:
        """Return what a report shows as lost. Nearly always the worker holds and computes all that it should."""
        live, awaiting = worker.live, worker.awaiting
        missing = [
            managed
            for managed in (live[attempt.request_id] for attempt in worker.unheld)
            if now_s - managed.live[instance] > _HOLD_GRACE_S
        ]
        if not (awaiting or worker.idle):
            return missing
        for managed in live.values():
            if managed.attempt in worker.unheld:
                continue
            if managed.attempt not in awaiting:
                managed.idle_since_s = None
            elif self._idle_for_s(now_s, managed) > _HOLD_GRACE_S:
                missing.append(managed)
        worker.idle = worker.idle and any(managed.idle_since_s is not None for managed in live.values())
        return missing

    def _idle_for_s(self, now_s: float, managed: Managed) -> float:
        """Return how long every holder has been waiting: the message that the attempt is parked, or where it goes on
        from there, was lost with a connection or with a former manager."""
        waits = list(managed.live) != [managed.parked_at] and all(
            managed.attempt in self.workers[name].awaiting for name in managed.live
        )
        if not waits:
            managed.idle_since_s = None
        elif managed.idle_since_s is None:
            managed.idle_since_s = now_s
            for name in managed.live:
                self.workers[name].idle = True
        return now_s - managed.idle_since_s if managed.idle_since_s is not None else 0.0

    def silent_workers(self, now_s: float, least_s: float = 0.0) -> list[tuple[InstanceId, float]]:
        """Return name and silence of the workers that count as dead, after `least_s` at least. Updates report ages."""
        silent, patience_s = [], max(self._report_timeout_s, least_s)
        for name, worker in self.workers.items():
            worker.view.report_age_s = now_s - worker.last_report_s
            if worker.view.report_age_s > patience_s:
                silent.append((name, worker.view.report_age_s))
        return silent

    def remove_worker(self, instance: InstanceId) -> list[Managed]:
        worker = self.workers.pop(instance)
        self._views = None
        self.expected.discard(instance)
        for attempt in worker.held - worker.attempts:
            self._remove_holder(attempt, instance)
        for managed in worker.live.values():
            assert self.requests.get(managed.request_id) is managed, f"{managed.attempt} is over and on {instance}"
            del managed.live[instance]
        return list(worker.live.values())

    def forget_workers(self) -> list[InstanceId]:
        """Forget all workers and return their names: each has to register anew. No attempt may be live."""
        names = list(self.workers)
        self.workers.clear()
        self._views = None
        self._other_holders.clear()
        self.forget_unclaimed()
        return names

    def serving(self) -> ServingViews:
        """Return the workers that take requests, as views that mark changes. Cached: every event calls this."""
        if self._views is None:
            views = {name: worker.view for name, worker in self.workers.items() if not worker.view.draining}
            self._views = ServingViews(views)
        return self._views

    def _touched(self, instance: InstanceId) -> None:
        if self._views is not None:
            self._views.touch(instance)

    def computing(self, attempt: Attempt) -> list[InstanceId]:
        """Return all workers that hold an attempt, if one of them has state of it; none if they all merely wait for its
        KV. Called for every attempt that gateways name after a restart, so no other worker is looked at."""
        holders = list(self._other_holders.get(attempt, ()))
        managed = self.requests.get(attempt.request_id)
        if managed is not None and managed.attempt == attempt:
            holders += [name for name in managed.live if attempt in self.workers[name].held]
        holders.sort(key=lambda name: self.workers[name].order)
        return holders if any(attempt not in self.workers[name].awaiting for name in holders) else []

    # -- attempts ----------------------------------------------------------------------------------------------

    def add(self, managed: Managed) -> None:
        known = self.requests.get(managed.request_id)
        if known is not None:
            assert known.attempt < managed.attempt, f"{managed.attempt} comes after {known.attempt}"
            self._claimed.discard(known.attempt)
        self.requests[managed.request_id] = managed
        self._claimed.add(managed.attempt)
        self._unclaimed.pop(managed.attempt, None)

    def adopt(self, now_s: float, attempt: Attempt, gateway: InstanceId, holders: Iterable[InstanceId]) -> None:
        """Add an attempt that a former manager placed and workers still compute."""
        adopted = Managed(attempt, gateway)
        self.add(adopted)
        for name in holders:
            self.engage(now_s, adopted, name)

    def remove(self, managed: Managed) -> list[InstanceId]:
        known = self.requests.pop(managed.request_id, None)
        assert known is managed, f"{managed.attempt} is over and was not there"
        self._claimed.discard(managed.attempt)
        holders = list(managed.live)
        for instance in holders:
            self.disengage(managed, instance)
        assert not managed.live, f"{managed.attempt} is over and on {[*managed.live]}"
        return [instance for instance in holders if instance in self.workers]

    def engage(self, now_s: float, managed: Managed, instance: InstanceId) -> None:
        assert instance in self.workers, f"{managed.attempt} is sent to {instance}, which is not there"
        assert self.requests.get(managed.request_id) is managed, f"{managed.attempt} is over, and sent to {instance}"
        managed.live[instance] = now_s
        worker = self.workers[instance]
        known = worker.live.get(managed.request_id)
        if known is not None:
            self._not_live(worker, instance, known.attempt)
        worker.live[managed.request_id] = managed
        worker.attempts.add(managed.attempt)
        if managed.attempt in worker.held:
            self._remove_holder(managed.attempt, instance)
        else:
            worker.unheld[managed.attempt] = None
        worker.idle |= managed.idle_since_s is not None
        if managed.item is not None:
            request = managed.item.request
            tokens = len(request.tokens)
            first = bool(managed.segments) and managed.segments[0].instance == instance
            worker.add_fresh(managed.request_id, (tokens if first else 0, tokens, request.adapter))
            self._touched(instance)

    def disengage(self, managed: Managed, instance: InstanceId) -> None:
        managed.live.pop(instance, None)
        worker = self.workers.get(instance)
        if worker is not None and worker.live.get(managed.request_id) is managed:
            del worker.live[managed.request_id]
            self._not_live(worker, instance, managed.attempt)
            if worker.fresh.pop(managed.request_id, None) is not None:
                worker.count_fresh()
                self._touched(instance)

    def _not_live(self, worker: Worker, instance: InstanceId, attempt: Attempt) -> None:
        worker.attempts.discard(attempt)
        worker.unheld.pop(attempt, None)
        if attempt in worker.held:
            self._other_holders.setdefault(attempt, []).append(instance)

    def finished(self, now_s: float, attempt: Attempt) -> None:
        if attempt not in self._finished_at_s:
            self._finished.append(attempt)
            self._finished_at_s[attempt] = now_s

    def has_finished(self, attempt: Attempt) -> bool:
        """Return whether it finished lately: a report older than the end must not bring it back."""
        return attempt in self._finished_at_s

    def is_overdue(self, now_s: float, attempt: Attempt) -> bool:
        """Return whether an attempt finished so long ago that its last tokens should have reached the gateway."""
        return now_s - self._finished_at_s.get(attempt, now_s) > _FINISHED_GRACE_S

    def forget_finished(self, now_s: float) -> None:
        while self._finished and now_s - self._finished_at_s[self._finished[0]] > _REMEMBERED_S:
            del self._finished_at_s[self._finished.popleft()]

    # -- what no gateway claims --------------------------------------------------------------------------------

    def _note_unclaimed(self, now_s: float, held: Iterable[Attempt], awaiting: Iterable[Attempt]) -> None:
        """Record unclaimed attempts in the worker's order, which is that of the cancels that may follow."""
        claimed = self._claimed
        if not (claimed.issuperset(held) and claimed.issuperset(awaiting)):
            for attempt in (*held, *awaiting):
                if attempt not in claimed:
                    self._unclaimed.setdefault(attempt, now_s)

    def forget_unclaimed(self) -> None:
        """Forget unclaimed attempts. Called while this manager does not lead: gateways then name nothing to it."""
        self._unclaimed.clear()

    def unclaimed_since_long(self, now_s: float) -> list[tuple[Attempt, list[InstanceId]]]:
        """Return, once, the attempts that no gateway has named for as long as one would need to, with their holders."""
        patience_s = max(_HOLD_GRACE_S, self._report_timeout_s)
        found = []
        while self._unclaimed:
            attempt, since_s = next(iter(self._unclaimed.items()))
            if now_s - since_s <= patience_s:
                break
            del self._unclaimed[attempt]
            found.append((attempt, sorted(self._other_holders[attempt], key=lambda name: self.workers[name].order)))
        return found

    def check(self) -> None:
        for request_id, managed in self.requests.items():
            if managed.request_id != request_id:
                raise InvariantViolated(f"{managed.attempt} is filed under {request_id}")
            if managed.waiting and (managed.live or managed.item is None):
                raise InvariantViolated(f"{managed.attempt} waits in the queue and is on {sorted(managed.live)}")
            if not managed.waiting and not managed.live:
                raise InvariantViolated(f"{managed.attempt} neither waits nor is on any worker")
            for instance in managed.live:
                worker = self.workers.get(instance)
                if worker is None or worker.live.get(request_id) is not managed:
                    raise InvariantViolated(f"{managed.attempt} is on {instance}, which does not know of it")
        for instance, worker in self.workers.items():
            for request_id, managed in worker.live.items():
                if self.requests.get(request_id) is not managed or instance not in managed.live:
                    raise InvariantViolated(f"{instance} has {managed.attempt}, which is not there")
            if worker.attempts != {managed.attempt for managed in worker.live.values()}:
                raise InvariantViolated(f"{instance}: its attempts are not those that are live there")
            if worker.unheld.keys() != worker.attempts - worker.held:
                raise InvariantViolated(f"{instance} is thought not to hold {sorted(worker.unheld)}")
            counted = (worker.view.assigned_requests, worker.view.assigned_context_tokens)
            if counted != (len(worker.fresh), sum(context for _, context, _ in worker.fresh.values())):
                raise InvariantViolated(f"{instance} counts {counted} of {len(worker.fresh)} on their way")
            if not worker.fresh.keys() <= worker.live.keys():
                raise InvariantViolated(f"{instance} counts load of {sorted(worker.fresh.keys() - worker.live.keys())}")
        claimed = {managed.attempt for managed in self.requests.values()}
        if claimed != self._claimed:
            raise InvariantViolated(f"claimed: {len(self._claimed)} attempts, live: {len(claimed)}")
        if both := claimed & self._unclaimed.keys():
            raise InvariantViolated(f"claimed, and claimed by nobody: {sorted(both)}")
        held = [(a, name) for name, it in self.workers.items() for a in it.held - it.attempts]
        if sorted(held) != sorted((a, name) for a, names in self._other_holders.items() for name in names):
            raise InvariantViolated(
                f"{len(held)} are held where they are not live, {len(self._other_holders)} are known"
            )
        if not self._unclaimed.keys() <= self._other_holders.keys():
            raise InvariantViolated("some are unclaimed and held by nobody")
        if self._finished_at_s.keys() != set(self._finished):
            raise InvariantViolated("the finished attempts and their times differ")


class LostAttempts:
    """Attempts that the manager gave back to their gateways a moment ago.

        AttemptsLost ──▶ awaited, `RESUBMIT_S` at most ──▶ Submit of the next attempt
             └─────────▶ sent, `_NOTICE_S` ──▶ sent again if its gateway still names it, `2 _SAID_S` ──▶ sent again …

    Lost work goes before work that came later, so placements wait for it. What a gateway still names was either named
    before it learned of the loss (`Outstanding` crosses `AttemptsLost`, many times if a process is seconds behind with
    its messages), or the message was lost: it is sent again, ever more seldom, and counts as lost once.
    """

    def __init__(self) -> None:
        self._awaited: dict[RequestId, float] = {}
        """Requests whose next attempt is expected, and until when placements wait for it."""
        self._notified: dict[Attempt, tuple[float, float]] = {}
        """Attempts by the time of their gateway's last notice, oldest first, and how long that counts as delivered."""

    def due_notices(self, now_s: float, attempts: Iterable[Attempt]) -> tuple[list[Attempt], list[Attempt]]:
        """Return the attempts whose loss the gateway must learn of: for the first time, and again. Marks them sent."""
        said = self._notified
        while said and now_s - next(iter(said.values()))[0] >= _LOST_REMEMBERED_S:
            del said[next(iter(said))]
        news, again = [], []
        for attempt in attempts:
            told_s, wait_s = said.get(attempt, (now_s, 0.0))
            if not wait_s:
                news.append(attempt)
                said[attempt] = now_s, _NOTICE_S
            elif now_s - told_s >= wait_s:
                again.append(attempt)
                assert wait_s <= _LONGEST_S < _LOST_REMEMBERED_S, f"{attempt} counts as told for {wait_s} s"
                del said[attempt]  # to the end of the order
                said[attempt] = now_s, min(2 * wait_s, _LONGEST_S)
        return news, again

    def expect(self, now_s: float, attempts: Iterable[Attempt]) -> None:
        self._awaited.update((attempt.request_id, now_s + RESUBMIT_S) for attempt in attempts)

    def resolve(self, request_id: RequestId) -> None:
        self._awaited.pop(request_id, None)

    def awaited(self, now_s: float) -> bool:
        if self._awaited:
            self._awaited = {name: until_s for name, until_s in self._awaited.items() if now_s < until_s}
        return bool(self._awaited)

    @property
    def until_s(self) -> float | None:
        """Time at which placements wait no longer, as far as known."""
        return max(self._awaited.values(), default=None)

    def clear(self) -> None:
        self._awaited.clear()
        self._notified.clear()
