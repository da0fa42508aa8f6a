"""The manager's record of gateways, workers, and the attempts on them.

    from gateways: submitted and outstanding attempts ──▶ `requests` ── `assign` ──▶ a worker's `live`
    from workers: registrations and reports           ──▶ a worker's `held` and `awaiting`

Attempt: one try to compute a request; a resubmission is the next one. Segment: its positions on one worker. Claimed:
in `requests`, as a gateway submitted or listed it. Parked: computed, and its KV is kept until the next worker is
chosen. `live`: sent to a worker and not ended there. `held`: reported by a worker. `awaiting`: held, and waits for its
KV or, parked, for its next worker. `unconfirmed`: live and not held: not yet reported, or no longer. Unreported: sent,
and never reported yet. Unclaimed: held and not claimed. Stray: held by a worker and not live there.

Called by `ManagerMachine` alone. Answers which attempts are lost, and which unclaimed. Sends and decides nothing.
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
"""Minimum time since an attempt was sent, stalled or became unclaimed, before it is given up: reports may be late."""
_FINISHED_GRACE_S = 5.0
"""Time in which a finished request's last tokens should reach its gateway: they travel on another connection."""
_FINISHED_REMEMBERED_S = 30.0
"""Time for which finished attempts are stored, so that one which its gateway still lists is not taken for lost."""
RESUBMIT_S = 0.1
"""Maximum time for which placement pauses, so that lost requests are resubmitted and go first. Many round trips fit."""
_RENOTIFY_AFTER_S = 1.5
"""Time after which an `AttemptsLost` is repeated if the gateway still lists the attempt; it doubles each time. Gateways
send a list once a second: a lost message is repeated upon the second or third list after it."""
_MAX_RENOTIFY_S = 12.0
_NOTICE_REMEMBERED_S = 60.0
"""Time for which a notice is stored, more than `_MAX_RENOTIFY_S`. An attempt listed later counts as newly lost."""


@dataclass(slots=True)
class Gateway:
    incarnation: int  # of its process: another number after every restart
    endpoint: str
    last_seen_at_s: float


@dataclass(slots=True)
class Worker:
    incarnation: int
    endpoint: str
    view: InstanceView
    last_report_at_s: float
    """Time of its last report; while it has no work, the time until which that one stands."""
    held: set[Attempt] = field(default_factory=set)
    """Attempts that it has, waiting or computing, according to its registration and the reports since."""
    awaiting: set[Attempt] = field(default_factory=set)  # a part of `held`
    live: dict[RequestId, ManagedAttempt] = field(default_factory=dict)  # as `ManagedAttempt.live` says
    attempts: set[Attempt] = field(default_factory=set)  # of `live`
    unconfirmed: dict[Attempt, None] = field(default_factory=dict)
    """Attempts in `live` and not in `held` (not yet, or no more), in the order in which they became so."""
    order: int = 0  # rank by first registration: a stable order of workers
    last_report_number: int = 0  # of the last report that was used; 0 = none since it registered
    may_have_stalled: bool = False
    """Whether an attempt in `live` may have `stalled_since_s` set."""
    unreported_loads: dict[RequestId, tuple[int, int, str]] = field(default_factory=dict)
    """Prefill tokens, context tokens and adapter of requests that were sent to it and have been in no report."""

    def add_unreported(self, request_id: RequestId, load: tuple[int, int, str]) -> None:
        """Add a request sent to it. The sums are updated, not made anew: thousands may be unreported."""
        again = request_id in self.unreported_loads
        self.unreported_loads[request_id] = load
        if again:
            self.count_unreported()
            return
        view, (prefill, context, adapter) = self.view, load
        view.assigned_requests += 1
        view.assigned_prefill_tokens += prefill
        view.assigned_context_tokens += context
        if adapter:
            view.assigned_adapters |= {adapter}

    def drop_reported(self) -> None:
        """Drop the load of requests that a report shows."""
        loads, unconfirmed = self.unreported_loads if self.unconfirmed else {}, self.unconfirmed
        self.unreported_loads = {id_: loads[id_] for id_ in loads if self.live[id_].attempt in unconfirmed}
        self.count_unreported()

    def count_unreported(self) -> None:
        """Count as load what was sent to the worker and is not in its last report."""
        loads = self.unreported_loads.values()
        self.view.assigned_requests = len(loads)
        self.view.assigned_prefill_tokens = sum(prefill for prefill, _, _ in loads)
        self.view.assigned_context_tokens = sum(context for _, context, _ in loads)
        self.view.assigned_adapters = frozenset([adapter for _, _, adapter in loads if adapter])


@dataclass(slots=True, eq=False)
class ManagedAttempt:
    """Attempt that waits for placement or is on workers. `item`: its request as policies see it; None if workers had it
    before this manager led. `live`: instances whose segment of it has not ended, and when it was sent there."""

    attempt: Attempt
    gateway: InstanceId
    item: WaitingRequest | None = None
    queued: bool = False  # for placement
    segments: tuple[Segment, ...] = ()
    live: dict[InstanceId, float] = field(default_factory=dict)
    parked_at: InstanceId = ""
    """Worker that computed `parked_positions` of it and keeps their KV until the next worker is chosen; "" = none."""
    parked_positions: int = 0
    stalled_since_s: float | None = None
    """Time since which all workers in `live` await its KV, so that nobody computes it; None while one does not."""

    @property
    def request_id(self) -> RequestId:
        return self.attempt.request_id


class Roster:
    def __init__(self, report_timeout_s: float) -> None:
        self.gateways: dict[InstanceId, Gateway] = {}
        self.workers: dict[InstanceId, Worker] = {}
        self.requests: dict[RequestId, ManagedAttempt] = {}
        self.expected_workers: set[InstanceId] = set()
        """Workers that gateways know of: after a start the manager waits until they have registered."""
        self._report_timeout_s = report_timeout_s
        self._views: ServingViews | None = None
        self._claimed: set[Attempt] = set()
        self._unclaimed: dict[Attempt, float] = {}
        """Unclaimed attempts, and the time since which they are known as such, oldest first."""
        self._stray_holders: dict[Attempt, list[InstanceId]] = {}
        """Workers that hold an attempt which is not live there: unclaimed, just ended, or live on others only."""
        self._registrations = 0
        self._finished: deque[Attempt] = deque()
        self._finished_at_s: dict[Attempt, float] = {}

    # -- gateways ----------------------------------------------------------------------------------------------

    def register_gateway(self, now_s: float, hello: GatewayHello) -> bool:
        """Record a gateway. Return whether it has restarted: then its earlier requests are void."""
        known = self.gateways.get(hello.instance)
        self.gateways[hello.instance] = Gateway(hello.incarnation, hello.endpoint, now_s)
        self.expected_workers.update(hello.workers)
        return known is not None and known.incarnation != hello.incarnation

    def touch_gateway(self, now_s: float, sender: InstanceId) -> bool:
        """Record a sign of life. Return False if the gateway has sent no `GatewayHello` yet."""
        gateway = self.gateways.get(sender)
        if gateway is None:
            return False
        gateway.last_seen_at_s = now_s
        return True

    def silent_gateways(self, now_s: float) -> list[InstanceId]:
        return [name for name, it in self.gateways.items() if now_s - it.last_seen_at_s > self._report_timeout_s]

    def requests_of(self, gateway: InstanceId) -> list[ManagedAttempt]:
        return [managed for managed in self.requests.values() if managed.gateway == gateway]

    # -- workers -----------------------------------------------------------------------------------------------

    def register_worker(self, now_s: float, message: RegisterWorker) -> None:
        known = self.workers.get(message.instance)
        assert known is None or known.incarnation == message.incarnation, f"{message.instance} still has an old process"
        view = InstanceView(message.instance, message.capacity)
        self._views = None
        self._registrations += 1
        stands_until_s = now_s + message.quiet_s
        worker = Worker(message.incarnation, message.endpoint, view, stands_until_s, order=self._registrations)
        if known is not None:  # registers again, as nothing has answered or this is a standby: keep what was sent
            worker.live, worker.attempts, worker.may_have_stalled = known.live, known.attempts, known.may_have_stalled
            worker.held, worker.unconfirmed, worker.order = known.held, known.unconfirmed, known.order
            worker.unreported_loads = known.unreported_loads
        self.workers[message.instance] = worker
        worker.awaiting = set(message.awaiting)
        self._replace_held(message.instance, worker, {*message.held, *message.awaiting})
        worker.drop_reported()
        self._note_unclaimed(now_s, message.held, message.awaiting)

    def read_report(self, now_s: float, report: WorkerReport) -> list[ManagedAttempt] | None:
        """Record a report. Return attempts that the worker should hold and does not, or that are stalled; None if it
        counts as dead or unknown. Its cost grows with the changes; a full report's, once a second, with all held."""
        worker = self.workers.get(report.instance)
        if worker is None or worker.incarnation != report.incarnation:
            return None
        worker.last_report_at_s, view = now_s if worker.live else now_s + report.quiet_s, worker.view
        view.report_age_s = 0.0
        if view.draining is not report.draining:
            view.draining = report.draining
            self._views = None
        if report.since and report.since != worker.last_report_number:
            return []  # it has the changes since a report that was lost: a full one follows
        worker.last_report_number = report.sequence
        view.stats = report.stats
        worker.awaiting = set(report.awaiting)  # always complete; `held` of a full report is without it
        if report.since:  # `held` and `gone` are changes
            for attempt in report.gone:
                self._remove_held(report.instance, worker, attempt)
            for attempt in (*report.held, *report.awaiting):
                self._add_held(report.instance, worker, attempt)
        else:
            self._replace_held(report.instance, worker, {*report.held, *report.awaiting})
        lost_or_stalled = self._lost_or_stalled(now_s, report.instance, worker)
        if worker.unreported_loads:
            worker.drop_reported()
        self._touched(report.instance)
        if report.since or self._unclaimed or not worker.held <= self._claimed:  # else a full report, all claimed
            self._note_unclaimed(now_s, report.held, report.awaiting)
        return lost_or_stalled

    def _replace_held(self, instance: InstanceId, worker: Worker, held: set[Attempt]) -> None:
        for attempt in sorted(worker.held - held):  # `unconfirmed` keeps this order: it must be reproducible
            self._remove_held(instance, worker, attempt)
        for attempt in held - worker.held:
            self._add_held(instance, worker, attempt)

    def _add_held(self, instance: InstanceId, worker: Worker, attempt: Attempt) -> None:
        if attempt in worker.held:
            return
        worker.held.add(attempt)
        if attempt in worker.attempts:
            worker.unconfirmed.pop(attempt, None)
        else:
            self._stray_holders.setdefault(attempt, []).append(instance)

    def _remove_held(self, instance: InstanceId, worker: Worker, attempt: Attempt) -> None:
        worker.held.discard(attempt)
        if attempt in worker.attempts:
            worker.unconfirmed[attempt] = None
        else:
            self._remove_stray(attempt, instance)

    def _remove_stray(self, attempt: Attempt, instance: InstanceId) -> None:
        """Remove a worker from an attempt's stray holders: it dropped the attempt, or was assigned it."""
        holders = self._stray_holders.get(attempt)
        if holders is not None and instance in holders:
            holders.remove(instance)
            if not holders:
                del self._stray_holders[attempt]
                self._unclaimed.pop(attempt, None)

    def _lost_or_stalled(self, now_s: float, instance: InstanceId, worker: Worker) -> list[ManagedAttempt]:
        """Return attempts that a report shows as lost or stalled. Cheap in the usual case, that there are none."""
        lost_or_stalled = [
            managed
            for managed in (worker.live[attempt.request_id] for attempt in worker.unconfirmed)
            if now_s - managed.live[instance] > _HOLD_GRACE_S
        ]
        if not (worker.awaiting or worker.may_have_stalled):
            return lost_or_stalled
        for managed in worker.live.values():
            if managed.attempt in worker.unconfirmed:
                continue
            if managed.attempt not in worker.awaiting:
                managed.stalled_since_s = None
            elif self._stalled_for_s(now_s, managed) > _HOLD_GRACE_S:
                lost_or_stalled.append(managed)
        if worker.may_have_stalled:
            worker.may_have_stalled = any(managed.stalled_since_s is not None for managed in worker.live.values())
        return lost_or_stalled

    def _stalled_for_s(self, now_s: float, managed: ManagedAttempt) -> float:
        """Return for how long all holders have waited for KV. Nobody sends it if a message was lost, with a connection
        or a former leader: that the attempt is parked, or the one that names its next worker."""
        only_parked = list(managed.live) == [managed.parked_at]  # awaits its next worker, which this manager chooses
        if only_parked or any(managed.attempt not in self.workers[name].awaiting for name in managed.live):
            managed.stalled_since_s = None
        elif managed.stalled_since_s is None:
            managed.stalled_since_s = now_s
            for name in managed.live:
                self.workers[name].may_have_stalled = True
        return now_s - managed.stalled_since_s if managed.stalled_since_s is not None else 0.0

    def silent_workers(self, now_s: float, min_timeout_s: float = 0.0) -> list[tuple[InstanceId, float]]:
        """Update all report ages. Return workers silent for longer than both timeouts, and for how long they are."""
        silent, timeout_s = [], max(self._report_timeout_s, min_timeout_s)
        for name, worker in self.workers.items():
            worker.view.report_age_s = max(0.0, now_s - worker.last_report_at_s)
            if worker.view.report_age_s > timeout_s:
                silent.append((name, worker.view.report_age_s))
        return silent

    def excuse(self, stalled_s: float) -> None:
        """Count no silence for a time in which the manager itself did not run: what arrived is read after it."""
        for gateway in self.gateways.values():
            gateway.last_seen_at_s += stalled_s
        for worker in self.workers.values():
            worker.last_report_at_s += stalled_s
        for managed in self.requests.values():
            managed.live = {name: sent_at_s + stalled_s for name, sent_at_s in managed.live.items()}
        self._unclaimed = {attempt: since_s + stalled_s for attempt, since_s in self._unclaimed.items()}

    def remove_worker(self, instance: InstanceId) -> list[ManagedAttempt]:
        worker = self.workers.pop(instance)
        self._views = None
        self.expected_workers.discard(instance)
        for attempt in worker.held - worker.attempts:
            self._remove_stray(attempt, instance)
        for managed in worker.live.values():
            assert self.requests.get(managed.request_id) is managed, f"ended {managed.attempt} is on {instance}"
            del managed.live[instance]
        return list(worker.live.values())

    def forget_workers(self) -> list[InstanceId]:
        """Forget all workers and return their names: each has to register anew. `requests` must be empty."""
        names = list(self.workers)
        self.workers.clear()
        self._views = None
        self._stray_holders.clear()
        self.forget_unclaimed()
        return names

    def serving(self) -> ServingViews:
        """Return views of the workers that take requests, with a record of changes. Cached: every event calls this."""
        if self._views is None:
            views = {name: worker.view for name, worker in self.workers.items() if not worker.view.draining}
            self._views = ServingViews(views)
        return self._views

    def _touched(self, instance: InstanceId) -> None:
        if self._views is not None:
            self._views.touch(instance)

    def computing(self, attempt: Attempt) -> list[InstanceId]:
        """Return all workers that hold an attempt; none if it is `awaiting` on all, so that nobody computes it. Called
        for every attempt that gateways list after a restart: it must not search all workers."""
        holders = list(self._stray_holders.get(attempt, ()))
        managed = self.requests.get(attempt.request_id)
        if managed is not None and managed.attempt == attempt:
            holders += [name for name in managed.live if attempt in self.workers[name].held]
        holders.sort(key=lambda name: self.workers[name].order)
        return holders if any(attempt not in self.workers[name].awaiting for name in holders) else []

    # -- attempts ----------------------------------------------------------------------------------------------

    def add(self, managed: ManagedAttempt) -> None:
        known = self.requests.get(managed.request_id)
        if known is not None:
            assert known.attempt < managed.attempt, f"{managed.attempt} is not later than {known.attempt}"
            self._claimed.discard(known.attempt)
        self.requests[managed.request_id] = managed
        self._claimed.add(managed.attempt)
        self._unclaimed.pop(managed.attempt, None)

    def adopt(self, now_s: float, attempt: Attempt, gateway: InstanceId, holders: Iterable[InstanceId]) -> None:
        """Add an attempt that workers compute and that was placed before this manager started or led."""
        adopted = ManagedAttempt(attempt, gateway)
        self.add(adopted)
        for name in holders:
            self.assign(now_s, adopted, name)

    def remove(self, managed: ManagedAttempt) -> list[InstanceId]:
        """Remove an attempt. Return the workers that it was live on."""
        known = self.requests.pop(managed.request_id, None)
        assert known is managed, f"{managed.attempt} is removed and was not in requests"
        self._claimed.discard(managed.attempt)
        holders = list(managed.live)
        for instance in holders:
            self.unassign(managed, instance)
        assert not managed.live, f"ended {managed.attempt} is on {[*managed.live]}"
        return holders

    def assign(self, now_s: float, managed: ManagedAttempt, instance: InstanceId) -> None:
        assert instance in self.workers, f"{managed.attempt} is sent to {instance}, which is not there"
        assert self.requests.get(managed.request_id) is managed, f"ended {managed.attempt} is sent to {instance}"
        managed.live[instance] = now_s
        worker = self.workers[instance]
        worker.last_report_at_s = min(worker.last_report_at_s, now_s)  # it has work, and reports as usual
        known = worker.live.get(managed.request_id)
        if known is not None:
            self._remove_live(worker, instance, known.attempt)
        worker.live[managed.request_id] = managed
        worker.attempts.add(managed.attempt)
        if managed.attempt in worker.held:
            self._remove_stray(managed.attempt, instance)
        else:
            worker.unconfirmed[managed.attempt] = None
        worker.may_have_stalled |= managed.stalled_since_s is not None
        if managed.item is not None:
            request = managed.item.request
            tokens = len(request.tokens)
            prefills = bool(managed.segments) and managed.segments[0].instance == instance  # all, even if split further
            worker.add_unreported(managed.request_id, (tokens if prefills else 0, tokens, request.adapter))
            self._touched(instance)

    def unassign(self, managed: ManagedAttempt, instance: InstanceId) -> None:
        managed.live.pop(instance, None)
        worker = self.workers.get(instance)
        if worker is not None and worker.live.get(managed.request_id) is managed:
            del worker.live[managed.request_id]
            self._remove_live(worker, instance, managed.attempt)
            if worker.unreported_loads.pop(managed.request_id, None) is not None:
                worker.count_unreported()
                self._touched(instance)

    def _remove_live(self, worker: Worker, instance: InstanceId, attempt: Attempt) -> None:
        worker.attempts.discard(attempt)
        worker.unconfirmed.pop(attempt, None)
        if attempt in worker.held:
            self._stray_holders.setdefault(attempt, []).append(instance)

    def note_finished(self, now_s: float, attempt: Attempt) -> None:
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
        while self._finished and now_s - self._finished_at_s[self._finished[0]] > _FINISHED_REMEMBERED_S:
            del self._finished_at_s[self._finished.popleft()]

    # -- unclaimed attempts ------------------------------------------------------------------------------------

    def _note_unclaimed(self, now_s: float, held: Iterable[Attempt], awaiting: Iterable[Attempt]) -> None:
        """Record unclaimed attempts in the order of the report: they may be cancelled in that order."""
        claimed = self._claimed
        if not (claimed.issuperset(held) and claimed.issuperset(awaiting)):
            for attempt in (*held, *awaiting):
                if attempt not in claimed:
                    self._unclaimed.setdefault(attempt, now_s)

    def forget_unclaimed(self) -> None:
        """Forget unclaimed attempts. Called while another manager leads: gateways list their attempts to that one."""
        self._unclaimed.clear()

    def take_stale_unclaimed(self, now_s: float) -> list[tuple[Attempt, list[InstanceId]]]:
        """Return attempts unclaimed for longer than gateways need to list them, with their holders. Forgets them."""
        timeout_s = max(_HOLD_GRACE_S, self._report_timeout_s)
        found = []
        while self._unclaimed:
            attempt, unclaimed_since_s = next(iter(self._unclaimed.items()))
            if now_s - unclaimed_since_s <= timeout_s:
                break
            del self._unclaimed[attempt]
            found.append((attempt, sorted(self._stray_holders[attempt], key=lambda name: self.workers[name].order)))
        return found

    def check(self) -> None:
        """Raise `InvariantViolated` if two indexes disagree."""
        for request_id, managed in self.requests.items():
            if managed.request_id != request_id:
                raise InvariantViolated(f"{managed.attempt} is filed under {request_id}")
            if managed.queued and (managed.live or managed.item is None):
                raise InvariantViolated(f"{managed.attempt} waits in the queue and is on {sorted(managed.live)}")
            if not managed.queued and not managed.live:
                raise InvariantViolated(f"{managed.attempt} neither waits nor is on any worker")
            for instance in managed.live:
                worker = self.workers.get(instance)
                if worker is None or worker.live.get(request_id) is not managed:
                    raise InvariantViolated(f"{managed.attempt} is on {instance}, which does not know of it")
        for instance, worker in self.workers.items():
            for request_id, managed in worker.live.items():
                if self.requests.get(request_id) is not managed or instance not in managed.live:
                    raise InvariantViolated(f"{managed.attempt} is live in {instance}'s record only")
            if worker.attempts != {managed.attempt for managed in worker.live.values()}:
                raise InvariantViolated(f"{instance}: `attempts` differs from `live`")
            if worker.unconfirmed.keys() != worker.attempts - worker.held:
                raise InvariantViolated(f"{instance}: unconfirmed are {sorted(worker.unconfirmed)}")
            counted = (worker.view.assigned_requests, worker.view.assigned_context_tokens)
            loads = worker.unreported_loads
            if counted != (len(loads), sum(context for _, context, _ in loads.values())):
                raise InvariantViolated(f"{instance} counts {counted} for {len(loads)} unreported")
            if not loads.keys() <= worker.live.keys():
                raise InvariantViolated(f"{instance}: not all that is unreported is live")
        claimed = {managed.attempt for managed in self.requests.values()}
        if claimed != self._claimed:
            raise InvariantViolated(f"only claimed or only in requests: {sorted(claimed ^ self._claimed)}")
        if both := claimed & self._unclaimed.keys():
            raise InvariantViolated(f"both claimed and unclaimed: {sorted(both)}")
        stray = [(a, name) for name, it in self.workers.items() for a in it.held - it.attempts]
        if sorted(stray) != sorted((a, name) for a, names in self._stray_holders.items() for name in names):
            raise InvariantViolated(f"stray are {sorted(stray)}, recorded {self._stray_holders}")
        if not self._unclaimed.keys() <= self._stray_holders.keys():
            raise InvariantViolated("some are unclaimed and held by nobody")
        if self._finished_at_s.keys() != set(self._finished):
            raise InvariantViolated("the finished attempts and their times differ")


class LostAttempts:
    """Attempts of whose loss the manager has notified their gateways.

        AttemptsLost ──▶ placements wait, `RESUBMIT_S` at most ──▶ Submit of the next attempt
        still listed by its gateway after `_RENOTIFY_AFTER_S` ──▶ AttemptsLost again; after twice that time, again …

    Lost requests are placed before newer ones, so placements wait for them. A gateway may list an attempt after its
    loss: because its `Outstanding` crossed our message, or because our message was lost. So the message is repeated,
    at growing intervals, and the loss is counted once.
    """

    def __init__(self) -> None:
        self._expected_until_s: dict[RequestId, float] = {}
        """Requests whose next attempt is expected, and until when placements wait for it."""
        self._notices: dict[Attempt, tuple[float, float]] = {}
        """Time of an attempt's last notice, and the time after which it is repeated; oldest notice first."""

    def due_notices(self, now_s: float, attempts: Iterable[Attempt]) -> tuple[list[Attempt], list[Attempt]]:
        """Return the attempts to notify for the first time, and those to notify again. Records both as notified."""
        notices = self._notices
        while notices and now_s - next(iter(notices.values()))[0] >= _NOTICE_REMEMBERED_S:
            del notices[next(iter(notices))]
        first, again = [], []
        for attempt in attempts:
            notified_at_s, wait_s = notices.get(attempt, (now_s, 0.0))
            if not wait_s:
                first.append(attempt)
                notices[attempt] = now_s, _RENOTIFY_AFTER_S
            elif now_s - notified_at_s >= wait_s:
                again.append(attempt)
                assert wait_s <= _MAX_RENOTIFY_S < _NOTICE_REMEMBERED_S, f"{attempt}: repeated only after {wait_s} s"
                del notices[attempt]  # the newest notice is the last
                notices[attempt] = now_s, min(2 * wait_s, _MAX_RENOTIFY_S)
        return first, again

    def expect(self, now_s: float, attempts: Iterable[Attempt]) -> None:
        self._expected_until_s.update((attempt.request_id, now_s + RESUBMIT_S) for attempt in attempts)

    def resolve(self, request_id: RequestId) -> None:
        self._expected_until_s.pop(request_id, None)

    def waits(self, now_s: float) -> bool:
        """Return whether placements wait, after dropping requests whose time is over."""
        if self._expected_until_s:
            self._expected_until_s = {key: at_s for key, at_s in self._expected_until_s.items() if now_s < at_s}
        return bool(self._expected_until_s)

    @property
    def waits_until_s(self) -> float | None:
        """Latest time until which placements wait; None if they do not."""
        return max(self._expected_until_s.values(), default=None)

    def clear(self) -> None:
        self._expected_until_s.clear()
        self._notices.clear()
