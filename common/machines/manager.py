"""The bucketing manager as a pure state machine: requests and reports in, placements out.

Its state is soft. Gateways own the requests, workers own what they compute; every second both say what they have, which
repairs the loss of any message:

    gateway says outstanding, no worker holds it   → AttemptsLost: the gateway submits it again (attempt + 1)
    worker holds it, no gateway says so            → Cancel: the worker frees it
    worker silent, restarted or leaving            → AttemptsLost for everything it held

so a lost message, a dead worker and a restarted manager are one case. A restarted manager first listens:

    start ── listens ──▶ places ─────────────────────▶ displaces what no worker holds
             until every worker that a gateway        `settle_s` after the start: not what
             named is registered, `_LISTEN_S` at most  workers are still busy with

`roster.py` keeps the books; here is what follows from them. The policies decide what goes where.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import msgspec

from cohort.common.errors import InvariantViolated
from cohort.common.machines.cluster_load import DrainRate, cluster_load
from cohort.common.machines.effects import ManagerEffect, Send, Wake
from cohort.common.machines.events import ManagerEvent, PeerLost, Received, Tick, Undelivered
from cohort.common.machines.manager_counters import ManagerCounters
from cohort.common.machines.manager_settings import ManagerSettings
from cohort.common.machines.parked_requests import ParkedRequests
from cohort.common.machines.roster import Managed, Roster
from cohort.common.machines.senders import may_say
from cohort.common.machines.vacating import Vacating
from cohort.common.messages import (
    AttemptsLost,
    Cancel,
    ClusterStats,
    GatewayHello,
    Leaving,
    ManagerHello,
    Message,
    Outstanding,
    Placed,
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
from cohort.common.policies.interface import ClusterView, WaitingRequest
from cohort.common.types import Attempt, InstanceId, Outcome, Request, RequestId

_LISTEN_S = 0.5
"""The longest a new manager waits with placements for workers to register; they try several times a second."""
_RESUBMIT_S = 0.1  # the longest placements wait for lost attempts to come again: far more than the way there and back
_LOOK_AGAIN_S = 0.05
"""While requests wait: between two looks at the queue that no message calls for. Policies go by the age of reports."""
_LEAST_WAIT_S = 0.001  # between two ticks, however far in the past a policy wanted to be asked


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
        self._settings = settings
        self._order = order
        self._placement = placement
        self._listened_at_s = now_s + min(_LISTEN_S, settings.settle_s)
        self._settled_at_s = now_s + settings.settle_s
        self._roster = Roster(settings.report_timeout_s)
        self._parked = ParkedRequests(self._roster, late_binding, self._send, self._start, self._reschedule)
        self._vacating = Vacating(self._roster, self._send, self._start, moves_kv=placement.moves_kv)
        self._resubmits: dict[RequestId, float] = {}
        """Lost attempts whose next one is on its way here, and until when placements wait for it."""
        self._cluster_stats: ClusterStats | None = None
        self._cluster_stats_at_s = 0.0
        self._next_load_s = 0.0
        self._drain_rate = DrainRate(now_s)
        self._told_wake_s: float | None = None
        self._look_again_s = float("inf")
        self._effects: list[ManagerEffect] = []

    # -- the host's side ---------------------------------------------------------------------------------------

    def handle(self, now_s: float, *events: ManagerEvent) -> list[ManagerEffect]:
        """See `Machine.handle`. Raises `InvariantViolated` for a message that is not to a manager."""
        schedule = load_due = False
        for event in events:
            match event:
                case Received(sender=sender, message=message):
                    schedule |= self._received(now_s, sender, message)
                case Undelivered(peer=peer) | PeerLost(peer=peer):
                    # Such a worker is dead to the manager, and registers anew if it lives; a gateway will greet again.
                    if peer in self._roster.workers:
                        self._worker_lost(now_s, peer, "cannot be reached")
                case Tick():
                    self._told_wake_s = None
                    self._tick(now_s)
                    schedule = load_due = True
                case _:
                    assert_never(event)
        if schedule:
            self._schedule(now_s)
        if load_due and now_s >= self._next_load_s:
            self._next_load_s = now_s + self._settings.load_interval_s
            self._send_load(now_s)
        wake_s = self._wake_s(now_s)
        if wake_s <= now_s:  # a wake that is due stands: each message would put it off by as much again
            wake_s = min(now_s + _LEAST_WAIT_S, self._told_wake_s or float("inf"))
        if wake_s != self._told_wake_s:
            self._told_wake_s = wake_s
            self._effects.append(Wake(wake_s))
        effects, self._effects = self._effects, []
        return effects

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
        return [each.item for each in self._roster.requests.values() if each.waiting and each.item is not None]

    def check(self) -> None:
        """Raise `InvariantViolated` if the books disagree with each other or with the queue."""
        self._roster.check()
        waiting = sum(managed.waiting for managed in self._roster.requests.values())
        if waiting != len(self._order):
            raise InvariantViolated(f"{waiting} requests wait, the queue has {len(self._order)}")

    def stats(self) -> dict[str, float]:
        return {
            "waiting": float(self.waiting),
            "live": float(self.live),
            "workers": float(self.workers),
            **self.counters.metrics(),
            **self._order.metrics(),
            **self._placement.metrics(),
            **self._parked.metrics(),
        }

    # -- events ------------------------------------------------------------------------------------------------

    def _received(self, now_s: float, sender: InstanceId, message: Message) -> bool:
        """True when something may be placed or bound now that could not before."""
        if not isinstance(message, ToManager):
            raise InvariantViolated(f"a {type(message).__name__} of {sender} is not for a manager")
        if not may_say(sender, message):
            self.counters.misnamed += 1
            return False
        match message:
            case GatewayHello():
                if self._roster.greeted(now_s, message):
                    self._abandon(now_s, message.instance, "gateway restarted")
                self._send(message.instance, ManagerHello(self._incarnation))
            case Submit(request=request):
                return self._submit(now_s, sender, request)
            case Cancel(attempts=attempts, reason=reason):
                for attempt in attempts:
                    self._resubmits.pop(attempt.request_id, None)
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
                self._cluster_stats, self._cluster_stats_at_s = message, now_s
            case _:
                assert_never(message)
        return False

    def _tick(self, now_s: float) -> None:
        for instance, silent_s in self._roster.silent_workers(now_s):
            self._worker_lost(now_s, instance, f"silent for {silent_s:.1f} s")
        for instance in self._roster.silent_gateways(now_s):
            self._abandon(now_s, instance, "gateway is silent")
        if now_s >= self._settled_at_s:
            for attempt, holders in self._roster.ownerless(now_s):
                for holder in holders:
                    self._send(holder, Cancel([attempt], "no gateway owns it"))
        self._roster.forget_finished(now_s)
        self._look_again_s = now_s + _LOOK_AGAIN_S if len(self._order) else float("inf")

    def _wake_s(self, now_s: float) -> float:
        """The next time something is due that no message brings about."""
        wake_s = min(self._next_load_s, self._look_again_s)
        order_s = self._order.next_wake_s(now_s)
        if order_s is not None:
            wake_s = min(wake_s, order_s)
        if len(self._order):
            if now_s < self._listened_at_s:
                wake_s = min(wake_s, self._listened_at_s)
            wake_s = min(wake_s, max(self._resubmits.values(), default=wake_s))
        return wake_s

    def _may_place(self, now_s: float) -> bool:
        """Lost requests are in the queue again, before all that came later."""
        if self._resubmits:
            self._resubmits = {name: until_s for name, until_s in self._resubmits.items() if now_s < until_s}
        return not self._resubmits and self._has_listened(now_s)

    def _has_listened(self, now_s: float) -> bool:
        """A worker that registers a moment later must not find all the work with the first one."""
        roster = self._roster
        return now_s >= self._listened_at_s or (bool(roster.expected) and roster.expected <= roster.workers.keys())

    # -- gateways ----------------------------------------------------------------------------------------------

    def _abandon(self, now_s: float, instance: InstanceId, reason: str) -> None:
        """No client waits for this gateway's requests any more. It stays known: an idle gateway may be silent."""
        for managed in self._roster.requests_of(instance):
            self._forget(now_s, managed, reason)

    def _heard(self, now_s: float, gateway: InstanceId) -> bool:
        """False for a gateway that has not greeted this incarnation: it is asked to, and will submit again."""
        if self._roster.heard(now_s, gateway):
            return True
        self._send(gateway, ManagerHello(self._incarnation))
        return False

    def _submit(self, now_s: float, sender: InstanceId, request: Request) -> bool:
        if not self._heard(now_s, sender):
            return False
        if self._roster.has_finished(request.attempt):
            return False  # said twice
        self._resubmits.pop(request.request_id, None)
        known = self._roster.requests.get(request.request_id)
        if known is not None:
            if known.attempt >= request.attempt:
                return False
            self._forget(now_s, known, "superseded")
        holders = self._roster.computing(request.attempt)
        if holders:  # a former manager placed it
            self._roster.adopt(now_s, request.attempt, sender, holders)
            return False
        self.counters.submitted += 1
        if len(self._order) >= self._settings.max_waiting_requests:
            self._refuse(sender, Refused(request.attempt, 429, "the manager's queue is full", "queue_full"))
            return False
        item = WaitingRequest(request, now_s, request.prediction)
        self._roster.add(Managed(request.attempt, sender, item, waiting=True))
        self._order.add(now_s, item)
        return True

    def _revise(self, now_s: float, message: RevisePrediction) -> None:
        managed = self._roster.requests.get(message.request_id)
        if managed is None:
            return
        if managed.waiting:
            self._order.revise(now_s, message.request_id, message.prediction)
        if managed.item is not None:  # the worker it is sent to later starts from the newest prediction
            managed.item.request = msgspec.structs.replace(managed.item.request, prediction=message.prediction)
            managed.item.prediction = message.prediction
        for instance in managed.live:
            self._send(instance, message)

    def _outstanding(self, now_s: float, sender: InstanceId, attempts: Iterable[Attempt]) -> None:
        if not self._heard(now_s, sender):
            return
        lost: list[Attempt] = []
        for attempt in attempts:
            managed = self._roster.requests.get(attempt.request_id)
            if managed is not None and managed.attempt >= attempt:
                continue
            if self._roster.has_finished(attempt):
                continue  # its gateway will hear
            holders = self._roster.computing(attempt)
            if holders:
                if managed is not None:
                    self._forget(now_s, managed, "superseded")
                self._roster.adopt(now_s, attempt, sender, holders)
            elif now_s >= self._settled_at_s:
                lost.append(attempt)
        if lost:
            self._resubmits.update((attempt.request_id, now_s + _RESUBMIT_S) for attempt in lost)
            self.counters.attempts_lost += len(lost)
            self._send(sender, AttemptsLost(lost, "unknown to the manager and to all workers"))

    # -- workers -----------------------------------------------------------------------------------------------

    def _register(self, now_s: float, message: RegisterWorker) -> None:
        if self._roster.is_new_incarnation(message):
            self._worker_lost(now_s, message.instance, "restarted")
        self._roster.registered(now_s, message)
        self._send(message.instance, Registered(self._incarnation))

    def _report(self, now_s: float, report: WorkerReport) -> bool:
        missing = self._roster.reported(now_s, report)
        if missing is None:
            self._send(report.instance, ManagerHello(self._incarnation))  # asks it to register
            return False
        for managed in missing:
            why = "does not hold it any more" if managed.idle_since_s is None else "waits in vain"
            self._reschedule(now_s, managed, f"{report.instance} {why}")
        self._vacating.reported(now_s, report.instance)
        return True

    def _worker_lost(self, now_s: float, instance: InstanceId, reason: str) -> None:
        self.counters.workers_lost += 1
        for managed in self._roster.remove_worker(instance):
            self._reschedule(now_s, managed, f"{instance}: {reason}")

    # -- placement ---------------------------------------------------------------------------------------------

    def _schedule(self, now_s: float) -> None:
        """Ask the policies what goes where now, and send it."""
        if not len(self._order) and not self._parked.binds:
            return
        cluster = self._cluster(now_s)
        if len(self._order) and cluster.instances and self._may_place(now_s):
            for dispatch in self._order.decide(now_s, cluster):
                for request_id in dispatch.request_ids:
                    managed = self._roster.requests.get(request_id)
                    if managed is not None and managed.item is not None and managed.waiting:
                        self._place(now_s, managed, managed.item, dispatch, cluster)
        self._parked.decide(now_s, cluster)

    def _place(
        self, now_s: float, managed: Managed, item: WaitingRequest, dispatch: policies.Dispatch, cluster: ClusterView
    ) -> None:
        decision = self._placement.place(now_s, item, cluster, dispatch.instance)
        match decision:
            case policies.Wait():
                self._order.add(now_s, item)
            case policies.Impossible(reason=reason):
                self._roster.remove(managed)
                self._refuse(managed.gateway, Refused(managed.attempt, 400, reason, "impossible"))
            case policies.Refuse() if item.accepted:
                self._order.add(now_s, item)
            case policies.Refuse(reason=cause, retry_after_s=retry_after_s, forecast_s=forecast_s):
                self._roster.remove(managed)
                self._placement.finished(now_s, managed.request_id)
                refused = Refused(managed.attempt, 429, "the server is busy", cause, retry_after_s, forecast_s)
                self._refuse(managed.gateway, refused)
            case policies.Placed(segments=segments, reason=reason, forecast_s=forecast_s):
                managed.waiting = False
                managed.segments = segments
                self.counters.dispatched += 1
                demoted = decision.best_effort and not item.accepted
                if demoted:
                    item.request = item.request.as_best_effort()
                    self.counters.demoted += 1
                # Later segments first: their workers know the request when the KV offer comes.
                for index in reversed(range(len(segments))):
                    self._start(now_s, managed, item, index, dispatch.batch_id)
                instances = [segment.instance for segment in segments if segment.instance is not None]
                queued_s = now_s - item.since_s
                self._send(managed.gateway, Placed(managed.attempt, instances, queued_s, reason, demoted, forecast_s))
            case _:
                assert_never(decision)

    def _start(self, now_s: float, managed: Managed, item: WaitingRequest, index: int, batch_id: int) -> None:
        segments, request = managed.segments, item.request
        if request.waited_s:  # resubmitted: its place in line is that of its first attempt
            request = msgspec.structs.replace(request, waited_s=request.waited_s + now_s - item.since_s)
        instance = segments[index].instance
        if instance is None:
            return
        following = segments[index + 1].instance if index + 1 < len(segments) else None
        self._roster.engage(now_s, managed, instance)
        self._send(
            instance,
            StartSegment(
                request,
                list(segments),
                index,
                self._roster.gateways[managed.gateway].endpoint,
                self._roster.workers[following].endpoint if following is not None else "",
                batch_id,
            ),
        )

    # -- endings -----------------------------------------------------------------------------------------------

    def _segment_ended(self, now_s: float, message: SegmentEnded) -> bool:
        managed = self._roster.requests.get(message.attempt.request_id)
        if managed is None or managed.attempt != message.attempt:
            return False
        match message.outcome:
            case Outcome.FINISHED:
                self.counters.finished += 1
                self._roster.disengage(managed, message.instance)
                self._roster.finished(now_s, managed.attempt)
                self._placement.completed(now_s, managed.request_id)
                self._forget(now_s, managed, "finished")
            case Outcome.HANDED_OVER:
                self._handed_over(now_s, managed, message.instance)
            case Outcome.PARKED:
                return self._parked.came(now_s, managed, message.instance, message.positions)
            case Outcome.CANCELLED:
                self._roster.disengage(managed, message.instance)
                if not managed.live:
                    self._reschedule(now_s, managed, message.reason)
            case Outcome.FAILED:
                self._roster.disengage(managed, message.instance)
                self._reschedule(now_s, managed, f"{message.instance}: {message.reason}")
            case _:
                assert_never(message.outcome)
        return True

    def _handed_over(self, now_s: float, managed: Managed, instance: InstanceId) -> None:
        if instance not in managed.live:
            return  # said twice
        self._roster.disengage(managed, instance)
        if not managed.live:  # adopted before the receiver was there
            for holder in self._roster.computing(managed.attempt):
                if holder != instance:
                    self._roster.engage(now_s, managed, holder)
            if not managed.live:
                self._reschedule(now_s, managed, f"{instance}: handed over to an unknown worker")
                return
        self._parked.moved(now_s, managed)

    def _reschedule(self, now_s: float, managed: Managed, reason: str) -> None:
        """This attempt is lost; its gateway decides how it goes on."""
        self.counters.attempts_lost += 1
        self._forget(now_s, managed, "lost")
        if managed.gateway in self._roster.gateways:
            self._resubmits[managed.request_id] = now_s + _RESUBMIT_S
            self._send(managed.gateway, AttemptsLost([managed.attempt], reason))

    def _forget(self, now_s: float, managed: Managed, reason: str) -> None:
        holders = self._roster.remove(managed)
        if managed.waiting:
            self._order.remove(now_s, managed.request_id)
        self._placement.finished(now_s, managed.request_id)
        self._parked.removed(now_s, managed.request_id)
        for instance in holders:
            self._send(instance, Cancel([managed.attempt], reason))

    def _refuse(self, gateway: InstanceId, refused: Refused) -> None:
        self.counters.refused[refused.cause] = self.counters.refused.get(refused.cause, 0) + 1
        self._send(gateway, refused)

    # -- what policies and gateways are told -------------------------------------------------------------------

    def _send(self, peer: InstanceId, message: Message) -> None:
        self._effects.append(Send(peer, message))

    def _cluster(self, now_s: float) -> ClusterView:
        stats = self._cluster_stats
        return ClusterView(
            instances=self._roster.serving(),
            arrival_rate=stats.arrival_rate if stats else 0.0,
            arrival_rate_forecast=stats.arrival_rate_forecast if stats else 0.0,
            mean_prompt_tokens=stats.mean_prompt_tokens if stats else 0.0,
            mean_output_tokens=stats.mean_output_tokens if stats else 0.0,
            forecast_age_s=now_s - self._cluster_stats_at_s if stats else float("inf"),
        )

    def _send_load(self, now_s: float) -> None:
        self._drain_rate.finished(now_s, self.counters.finished)
        load = cluster_load(
            self._roster.serving().values(),
            ready=self._has_listened(now_s),
            waiting=self.waiting,
            waiting_tokens=self._order.waiting_tokens,
            running=self.live - self.waiting,
            drain_rate=self._drain_rate.per_s,
        )
        for gateway in self._roster.gateways:
            self._send(gateway, load)
