"""The bucketing manager as a pure state machine: requests and reports in, placements out.

Its state is soft. Gateways own the requests, workers own what they compute; every second both list what they have,
which repairs the loss of any message:

    gateway names it, no worker holds it           → AttemptsLost: the gateway submits it again (attempt + 1)
    worker holds it, no gateway names it           → Cancel: the worker frees it
    worker silent, restarted or leaving            → AttemptsLost for everything it held

so a lost message, a dead worker and a restarted manager are one case. A restarted manager first listens
(`StartupWait`).

Of several managers one leads (`leadership.py`); the others stand by: they know the peers and decide nothing. To take
over is to start again without the start. `roster.py` holds what is known; the policies decide what goes where.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from cohort.common.config import Config
from cohort.common.errors import InvariantViolated
from cohort.common.machines.effects import ManagerEffect, Send, Wake
from cohort.common.machines.events import ManagerEvent, PeerLost, Received, Tick, Undelivered
from cohort.common.machines.machine import own_stall_s
from cohort.common.machines.manager.dispatcher import Dispatcher, Evacuation, ManagerCounters, ParkedRequests
from cohort.common.machines.manager.leadership import Leadership, StartupWait
from cohort.common.machines.manager.roster import LostAttempts, ManagedAttempt, Roster
from cohort.common.machines.senders import may_send
from cohort.common.messages import (
    AttemptsLost,
    BindSegment,
    Cancel,
    ClusterLoad,
    ClusterStats,
    GatewayHello,
    Leaving,
    ManagerHello,
    Message,
    Outstanding,
    PrefetchKv,
    Refused,
    Registered,
    RegisterWorker,
    RevisePrediction,
    SegmentEnded,
    StartSegment,
    Submit,
    ToManager,
    WorkerReport,
)
from cohort.common.policies import interface as policies
from cohort.common.policies.interface import ClusterView, InstanceView, WaitingRequest
from cohort.common.types import Attempt, InstanceId, Outcome, Request

_QUEUE_POLL_S = 0.05
"""Interval at which a queue is checked that no message calls for. Policies go by the age of reports."""
_LEAST_WAIT_S = 0.001  # between two ticks, however far in the past a policy wanted to be called
_REGISTERS_S = 3.0  # workers register with a manager that stands by several times in this time
_LATE_S = 1.0  # that a tick of a busy process may come: a part of `report_timeout_s`
_WINDOW_S = 1.0  # of which the drain rate's average is made
_WEIGHT = 0.2
_Command = StartSegment | BindSegment | PrefetchKv | Cancel
_CarriesEpoch = WorkerReport | GatewayHello | RegisterWorker
_ReadOnStandby = GatewayHello | RegisterWorker | Leaving | ClusterStats
_AddressedToLeader = Submit | Outstanding | WorkerReport
"""Messages whose sender believes that this manager leads."""

_SETTLE_S = 2.0
"""Time after a restart until requests that no worker holds are rescheduled: workers and gateways report several
times."""
_MAX_WAITING_REQUESTS = 100_000
"""Maximum over all gateways. Each bounds what it admits; this only keeps a mistake there from filling memory."""


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    report_timeout_s: float
    settle_s: float
    load_interval_s: float
    max_waiting_requests: int
    rank: int = 0
    managers: int = 1
    """Place in the order of all managers, and their number."""

    @classmethod
    def of(cls, config: Config, rank: int = 0, managers: int = 1) -> ManagerSettings:
        manager = config.manager
        return cls(manager.report_timeout_s, _SETTLE_S, manager.load_interval_s, _MAX_WAITING_REQUESTS, rank, managers)


class ManagerMachine:
    def __init__(
        self,
        instance: InstanceId,
        incarnation: int,
        settings: ManagerSettings,
        order: policies.PrefillOrder,
        placement: policies.Placement,
        late_binding: policies.LateBinding | None,
        now_s: float,
    ) -> None:
        self.instance = instance
        self.counters = ManagerCounters()
        self._incarnation = incarnation
        self._lead = Leadership(incarnation, settings.rank, settings.managers)
        self._settings = settings
        self._order = order
        self._placement = placement
        self._roster = Roster(settings.report_timeout_s)
        self._settling = StartupWait(self._roster, settings.settle_s, now_s)
        self._dispatcher = Dispatcher(self._roster, order, placement, self.counters, self._send)
        start = self._dispatcher.start
        self._parked = ParkedRequests(self._roster, late_binding, self._send, start, self._reschedule)
        self._vacating = Evacuation(self._roster, self._send, start, placement.moves_kv)
        self._lost = LostAttempts()
        self._forecast = Forecast()
        self._next_load_s = 0.0
        self._quiet_s = 0.0
        self._drain_rate = DrainRate(now_s)
        self._requested_wake_s: float | None = None
        self._queue_poll_s = float("inf")
        self._now_s = now_s
        self._effects: list[ManagerEffect] = []

    def handle(self, now_s: float, *events: ManagerEvent) -> list[ManagerEffect]:
        """See `Machine.handle`. Raises `InvariantViolated` for a message that is not to a manager."""
        schedule = load_due = False
        assert now_s >= self._now_s, f"it is {now_s} s, and was {self._now_s} s"
        if now_s - self._now_s > _LATE_S:
            self._roster.excuse(own_stall_s(now_s, self._now_s, self._requested_wake_s, _LATE_S))
        self._now_s = now_s
        for event in events:
            match event:
                case Received(sender=sender, message=message):
                    schedule |= self._received(now_s, sender, message)
                case Undelivered(peer=peer) | PeerLost(peer=peer):
                    # Such a worker is dead to the manager, and registers anew if it lives; a gateway will greet again.
                    if peer in self._roster.workers:
                        self._worker_lost(now_s, peer, "cannot be reached")
                    elif peer not in self._roster.gateways:
                        self._settling.on_worker_lost(now_s, peer)
                case Tick(quiet_s=quiet_s):
                    self._requested_wake_s = None
                    self._tick(now_s)
                    self._set_quiet(now_s, quiet_s)
                    schedule = load_due = True
                case _:
                    assert_never(event)
        for gateway, attempts in self._settling.take_named(now_s).items():
            self._outstanding(now_s, gateway, attempts)
        if schedule and self._lead.leads:
            self._schedule(now_s)
        if load_due and now_s >= self._next_load_s:
            self._next_load_s = now_s + self._settings.load_interval_s + self._quiet_s
            if self._lead.leads:
                self._send_load(now_s)
        wake_s = self._wake_s(now_s)
        if wake_s <= now_s:  # a wake that is due stands: each message would put it off by as much again
            wake_s = min(now_s + _LEAST_WAIT_S, self._requested_wake_s or float("inf"))
        if wake_s != self._requested_wake_s:
            self._requested_wake_s = wake_s
            self._effects.append(Wake(wake_s))
        assert self._lead.leads or not (self._roster.requests or len(self._order)), (
            f"stands by and has {self.live} requests, {self.waiting} of them waiting"
        )
        effects, self._effects = self._effects, []
        return effects

    @property
    def leads(self) -> bool:
        return self._lead.leads

    @property
    def waiting(self) -> int:
        return len(self._order)

    @property
    def live(self) -> int:
        return len(self._roster.requests)

    @property
    def workers(self) -> int:
        return len(self._roster.workers)

    def queued(self) -> list[WaitingRequest]:
        return [each.item for each in self._roster.requests.values() if each.queued and each.item is not None]

    def check(self) -> None:
        self._roster.check()
        waiting = sum(managed.queued for managed in self._roster.requests.values())
        if waiting != len(self._order):
            raise InvariantViolated(f"{waiting} requests wait, the queue has {len(self._order)}")
        if self._roster.requests and not self._lead.leads:
            raise InvariantViolated(f"stands by and has {self.live} requests")

    def stats(self) -> dict[str, float]:
        return {
            "waiting": float(self.waiting),
            "live": float(self.live),
            "workers": float(self.workers),
            "leads": float(self._lead.leads),
            **self.counters.metrics(),
            **self._order.metrics(),
            **self._placement.metrics(),
            **self._parked.metrics(),
        }

    def _received(self, now_s: float, sender: InstanceId, message: Message) -> bool:
        """Handle a message. Return whether something may be placed or bound now that could not before."""
        if not isinstance(message, ToManager):
            raise InvariantViolated(f"a {type(message).__name__} of {sender} is not for a manager")
        if not may_send(sender, message):
            self.counters.misnamed += 1
            return False
        if isinstance(message, _CarriesEpoch):
            requested = isinstance(message, GatewayHello) and message.lead
            if self._lead.outranked(now_s, message.epoch, requested=requested):
                self._step_down(now_s)
        if not self._lead.leads and not isinstance(message, _ReadOnStandby):
            if isinstance(message, _AddressedToLeader):
                self._send(sender, self._hello())
            return False
        match message:
            case GatewayHello():
                if self._roster.register_gateway(now_s, message):
                    self._abandon(now_s, message.instance, "gateway restarted")
                if message.lead and self._lead.take(now_s):
                    self._take_over(now_s, message)
                self._send(message.instance, self._hello())
            case Submit(request=request):
                return self._submit(now_s, sender, request)
            case Cancel(attempts=attempts, reason=reason):
                for attempt in attempts:
                    self._lost.resolve(attempt.request_id)
                    managed = self._roster.requests.get(attempt.request_id)
                    if managed is not None and managed.attempt == attempt and managed.gateway == sender:
                        self._forget(now_s, managed, reason)
            case RevisePrediction():
                self._revise(now_s, message)
            case Outstanding(attempts=attempts):
                self._outstanding(now_s, sender, attempts)
            case RegisterWorker():
                self._register(now_s, message)
            case WorkerReport():
                return self._report(now_s, message)
            case SegmentEnded():
                return self._segment_ended(now_s, message)
            case Leaving(instance=instance, incarnation=incarnation):
                worker = self._roster.workers.get(instance)
                if worker is not None and worker.incarnation == incarnation:
                    self._worker_lost(now_s, instance, "left")
            case ClusterStats():
                self._forecast.update(now_s, message)
            case _:
                assert_never(message)
        return False

    def _tick(self, now_s: float) -> None:
        least_s = 0.0 if self._lead.leads else _REGISTERS_S
        for instance, silent_s in self._roster.silent_workers(now_s, least_s):
            self._worker_lost(now_s, instance, f"silent for {silent_s:.1f} s")
        for instance in self._roster.silent_gateways(now_s):
            self._abandon(now_s, instance, "gateway is silent")
        if not self._lead.leads:
            self._roster.forget_unclaimed()
        elif self._settling.has_settled(now_s):
            for attempt, holders in self._roster.take_stale_unclaimed(now_s):
                for holder in holders:
                    self._send(holder, Cancel([attempt], "no gateway owns it"))
        self._roster.forget_finished(now_s)
        self._queue_poll_s = now_s + _QUEUE_POLL_S if len(self._order) else float("inf")

    def _set_quiet(self, now_s: float, quiet_s: float) -> None:
        """Take over how late loads may be: not at all with requests, or where gateways choose another leader."""
        before_s, self._quiet_s = self._quiet_s, 0.0 if self.live or self._settings.managers > 1 else quiet_s
        if self._quiet_s < before_s:
            self._next_load_s = now_s

    def _wake_s(self, now_s: float) -> float:
        wake_s = min(self._next_load_s, self._queue_poll_s)
        order_s = self._order.next_wake_s(now_s)
        if order_s is not None:
            wake_s = min(wake_s, order_s)
        if len(self._order):
            if now_s < self._settling.listened_at_s:
                wake_s = min(wake_s, self._settling.listened_at_s)
            wake_s = min(wake_s, self._lost.waits_until_s or wake_s)
        return wake_s

    def _hello(self) -> ManagerHello:
        return ManagerHello(self._incarnation, self._lead.epoch, self._lead.leads)

    def _take_over(self, now_s: float, hello: GatewayHello) -> None:
        """Lead as after a start: all workers register anew, gateways submit and name what is theirs."""
        assert not self._roster.requests, f"takes over and has {self.live} requests"
        self.counters.takeovers += 1
        workers = self._roster.forget_workers()
        self._roster.expected_workers = {*workers, *hello.workers}
        self._settling.begin(now_s)
        for peer in (*workers, *(name for name in self._roster.gateways if name != hello.instance)):
            self._send(peer, self._hello())

    def _step_down(self, now_s: float) -> None:
        """Drop everything: another manager leads. Gateways submit and name it there; nothing is reported lost."""
        for managed in list(self._roster.requests.values()):
            self._drop(now_s, managed)
        self._lost.clear()
        self._settling.forget()
        for gateway in self._roster.gateways:
            self._send(gateway, self._hello())

    def _abandon(self, now_s: float, instance: InstanceId, reason: str) -> None:
        """Forget the gateway's requests, for which no client waits. It stays known: an idle gateway may be silent."""
        for managed in self._roster.requests_of(instance):
            self._forget(now_s, managed, reason)

    def _is_registered(self, now_s: float, gateway: InstanceId) -> bool:
        """Return False for a gateway that has not greeted this incarnation: it is asked to, and will submit again."""
        if self._roster.touch_gateway(now_s, gateway):
            return True
        self._send(gateway, self._hello())
        return False

    def _submit(self, now_s: float, sender: InstanceId, request: Request) -> bool:
        if not self._is_registered(now_s, sender):
            return False
        if self._roster.has_finished(request.attempt):
            return False  # sent twice
        self._lost.resolve(request.request_id)
        known = self._roster.requests.get(request.request_id)
        if known is not None:
            if known.attempt >= request.attempt:
                return False
            self._forget(now_s, known, "superseded")
        if holders := self._roster.computing(request.attempt):  # a former manager placed it
            self._roster.adopt(now_s, request.attempt, sender, holders)
            return False
        self.counters.submitted += 1
        if len(self._order) >= self._settings.max_waiting_requests:
            self._dispatcher.refuse(sender, Refused(request.attempt, 429, "the manager's queue is full", "queue_full"))
            return False
        item = WaitingRequest(request, now_s, request.prediction)
        self._roster.add(ManagedAttempt(request.attempt, sender, item, queued=True))
        waiting = len(self._order)
        self._order.add(now_s, item)
        assert len(self._order) == waiting + 1, f"{request.attempt} came, {len(self._order)} wait after {waiting}"
        return True

    def _revise(self, now_s: float, message: RevisePrediction) -> None:
        managed = self._roster.requests.get(message.request_id)
        if managed is None:
            return
        if managed.queued:
            self._order.revise(now_s, message.request_id, message.prediction)
        if managed.item is not None:  # the worker it is sent to later starts from the newest prediction
            managed.item.request = msgspec.structs.replace(managed.item.request, prediction=message.prediction)
            managed.item.prediction = message.prediction
        for instance in managed.live:
            self._send(instance, message)

    def _outstanding(self, now_s: float, sender: InstanceId, attempts: Collection[Attempt]) -> None:
        if not self._is_registered(now_s, sender):
            return
        if not (settled := self._settling.has_settled(now_s)):
            self._settling.named(sender, attempts)
        lost: list[Attempt] = []
        overdue: list[Attempt] = []
        for attempt in attempts:
            managed = self._roster.requests.get(attempt.request_id)
            if managed is not None and managed.attempt >= attempt:
                continue
            if self._roster.has_finished(attempt):
                if self._roster.is_overdue(now_s, attempt):
                    overdue.append(attempt)
                continue  # its gateway will learn of it
            holders = self._roster.computing(attempt)
            if holders:
                if managed is not None:
                    self._forget(now_s, managed, "superseded")
                self._roster.adopt(now_s, attempt, sender, holders)
            elif settled:
                lost.append(attempt)
        new, again = self._lost.due_notices(now_s, lost)
        self._lost.expect(now_s, new)
        self.counters.attempts_lost += len(new)
        due = (new, "unknown to the manager and to all workers", False), (again, "lost before, and named since", True)
        ended = [attempt for each in self._lost.due_notices(now_s, overdue) for attempt in each]
        for those, reason, counted in (*due, (ended, "finished, and waited for since", True)):
            if those:
                self._send(sender, AttemptsLost(those, reason, unheld=True, counted=counted))

    def _register(self, now_s: float, message: RegisterWorker) -> None:
        known = self._roster.workers.get(message.instance)
        if known is not None and known.incarnation != message.incarnation:
            self._worker_lost(now_s, message.instance, "restarted")
        self._roster.register_worker(now_s, message)
        self._settling.on_registered(message.instance)
        self._send(message.instance, Registered(self._incarnation, self._lead.epoch, self._lead.leads))

    def _report(self, now_s: float, report: WorkerReport) -> bool:
        lost_or_stalled = self._roster.read_report(now_s, report)
        if lost_or_stalled is None:
            self._send(report.instance, self._hello())  # asks it to register
            return False
        self._placement.reported(now_s, self._roster.workers[report.instance].view)
        for managed in lost_or_stalled:
            why = "does not hold it any more" if managed.stalled_since_s is None else "waits in vain"
            self._reschedule(now_s, managed, f"{report.instance} {why}")
        self._vacating.reported(now_s, report.instance)
        return True

    def _worker_lost(self, now_s: float, instance: InstanceId, reason: str) -> None:
        self.counters.workers_lost += 1
        self._settling.on_worker_lost(now_s, instance)
        self._give_back(now_s, self._roster.remove_worker(instance), f"{instance}: {reason}")

    def _schedule(self, now_s: float) -> None:
        if not len(self._order) and not self._parked.binds:
            return
        cluster = self._forecast.cluster(now_s, self._roster.serving())
        if (
            len(self._order)
            and cluster.instances
            and not self._lost.waits(now_s)  # lost requests are in the queue again, before all that came later
            and self._settling.has_listened(now_s)
        ):
            self._dispatcher.dispatch(now_s, cluster)
        self._parked.decide(now_s, cluster)

    def _segment_ended(self, now_s: float, message: SegmentEnded) -> bool:
        managed = self._roster.requests.get(message.attempt.request_id)
        if managed is None or managed.attempt != message.attempt:
            return False
        match message.outcome:
            case Outcome.FINISHED:
                self.counters.finished += 1
                self._roster.unassign(managed, message.instance)
                self._roster.note_finished(now_s, managed.attempt)
                self._placement.completed(now_s, managed.request_id)
                self._forget(now_s, managed, "finished")
            case Outcome.HANDED_OVER:
                self._handed_over(now_s, managed, message.instance)
            case Outcome.PARKED:
                return self._parked.on_parked(now_s, managed, message.instance, message.positions)
            case Outcome.CANCELLED:
                self._roster.unassign(managed, message.instance)
                if not managed.live:
                    self._reschedule(now_s, managed, message.reason)
            case Outcome.FAILED:
                self._roster.unassign(managed, message.instance)
                self._reschedule(now_s, managed, f"{message.instance}: {message.reason}")
            case _:
                assert_never(message.outcome)
        return True

    def _handed_over(self, now_s: float, managed: ManagedAttempt, instance: InstanceId) -> None:
        if instance not in managed.live:
            return  # sent twice
        self._roster.unassign(managed, instance)
        if not managed.live:  # adopted before the receiver was there
            for holder in self._roster.computing(managed.attempt):
                if holder != instance:
                    self._roster.assign(now_s, managed, holder)
            if not managed.live:
                self._reschedule(now_s, managed, f"{instance}: handed over to an unknown worker")
                return
        self._parked.moved(now_s, managed)

    def _reschedule(self, now_s: float, managed: ManagedAttempt, reason: str) -> None:
        """Give an attempt up as lost; its gateway decides how it goes on."""
        self._give_back(now_s, [managed], reason)

    def _give_back(self, now_s: float, lost: Sequence[ManagedAttempt], reason: str) -> None:
        """Give attempts up, with one message to each gateway."""
        attempts: dict[InstanceId, list[Attempt]] = {}
        for managed in lost:
            self._forget(now_s, managed, "lost")
            if managed.gateway in self._roster.gateways:
                attempts.setdefault(managed.gateway, []).append(managed.attempt)
        for gateway, own in attempts.items():
            new, _ = self._lost.due_notices(now_s, own)
            self._lost.expect(now_s, own)
            self.counters.attempts_lost += len(new)
            self._send(gateway, AttemptsLost(own, reason))

    def _forget(self, now_s: float, managed: ManagedAttempt, reason: str) -> None:
        for instance in self._drop(now_s, managed):
            self._send(instance, Cancel([managed.attempt], reason))

    def _drop(self, now_s: float, managed: ManagedAttempt) -> list[InstanceId]:
        assert not (managed.queued and managed.live), f"{managed.attempt} waits and is on {[*managed.live]}"
        holders = self._roster.remove(managed)
        if managed.queued:
            waiting = len(self._order)
            self._order.remove(now_s, managed.request_id)
            assert len(self._order) == waiting - 1, f"{managed.attempt} left, {len(self._order)} wait after {waiting}"
        self._placement.finished(now_s, managed.request_id)
        self._parked.removed(now_s, managed.request_id)
        return holders

    def _send(self, peer: InstanceId, message: Message) -> None:
        if self._lead.epoch and isinstance(message, _Command):
            message = msgspec.structs.replace(message, epoch=self._lead.epoch)
        self._effects.append(Send(peer, message))

    def _send_load(self, now_s: float) -> None:
        self._drain_rate.finished(now_s, self.counters.finished)
        load = cluster_load(
            self._roster.serving().values(),
            ready=self._settling.has_listened(now_s),
            waiting=self.waiting,
            waiting_tokens=self._order.waiting_tokens,
            running=self.live - self.waiting,
            drain_rate=self._drain_rate.per_s,
            quiet_s=self._quiet_s,
        )
        for gateway in self._roster.gateways:
            self._send(gateway, load)


class DrainRate:
    """Requests finished per second, moving average; 0 until the first second with one has passed."""

    def __init__(self, now_s: float) -> None:
        self.per_s = 0.0
        self._at_s = now_s
        self._finished = 0

    def finished(self, now_s: float, total: int) -> None:
        passed_s = now_s - self._at_s
        if passed_s >= _WINDOW_S:
            rate = (total - self._finished) / passed_s
            self.per_s = rate if self.per_s == 0.0 else (1 - _WEIGHT) * self.per_s + _WEIGHT * rate
            self._at_s, self._finished = now_s, total


def cluster_load(
    views: Collection[InstanceView],
    *,
    ready: bool,
    waiting: int,
    waiting_tokens: int,
    running: int,
    drain_rate: float,
    quiet_s: float = 0.0,
) -> ClusterLoad:
    """Return the load for gateways. `views`: of the workers that take requests."""
    return ClusterLoad(
        ready=ready and bool(views),
        instances=[view.instance for view in views],
        waiting=waiting,
        waiting_tokens=waiting_tokens,
        running=running,
        free_tokens=sum(view.capacity.geometry.positions(view.free_blocks) for view in views),
        total_tokens=sum(view.capacity.positions for view in views),
        max_model_len=max((view.capacity.max_model_len for view in views), default=0),
        drain_rate=drain_rate,
        engines=list(dict.fromkeys(view.capacity.engine for view in views if view.capacity.engine is not None)),
        quiet_s=quiet_s,
    )


class Forecast:
    def __init__(self) -> None:
        self._stats: ClusterStats | None = None
        self._updated_s = 0.0

    def update(self, now_s: float, stats: ClusterStats) -> None:
        self._stats, self._updated_s = stats, now_s + stats.quiet_s

    def cluster(self, now_s: float, serving: Mapping[InstanceId, InstanceView]) -> ClusterView:
        """Return the cluster for policies. `serving`: the workers that take requests."""
        stats = self._stats
        if stats is None:
            return ClusterView(serving)
        return ClusterView(
            instances=serving,
            arrival_rate=stats.arrival_rate,
            arrival_rate_forecast=stats.arrival_rate_forecast,
            mean_prompt_tokens=stats.mean_prompt_tokens,
            mean_output_tokens=stats.mean_output_tokens,
            forecast_age_s=max(0.0, now_s - self._updated_s),
        )
