"""The bucketing manager as a pure state machine: requests and reports in, placements out.

Its state is soft. Gateways own the requests, workers own what they compute; every second both say what they have, and
whatever one side misses is repaired:

    gateway says outstanding, no worker holds it   → Displaced: the gateway submits it again (attempt + 1)
    worker holds it, no gateway says so            → Cancel: the worker frees it
    worker silent, restarted or leaving            → Displaced for everything it held

so a lost message, a dead worker and a restarted manager are one case. After a start the manager first listens for
`settle_s`, so that it does not displace what workers are still busy with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from cohort.common.config import Config
from cohort.common.machines.effects import Effect, Send
from cohort.common.messages import (
    BindSegment,
    Cancel,
    ClusterFigures,
    ClusterLoad,
    Displaced,
    GatewayHello,
    Leaving,
    ManagerHello,
    Message,
    Outstanding,
    Placed,
    PrefetchKv,
    Refused,
    Registered,
    RegisterWorker,
    RevisePrediction,
    SegmentEnded,
    StartSegment,
    Submit,
    WorkerReport,
)
from cohort.common.policies import interface as seats
from cohort.common.policies.interface import ClusterView, InstanceView, WaitingRequest
from cohort.common.types import Attempt, InstanceId, Request, RequestId, Segment

_HOLD_GRACE_S = 2.0
"""A worker's report may miss what was sent to it so recently."""
_FINISHED_GRACE_S = 5.0
"""A finished request's last tokens travel on another connection and may reach its gateway later than we know."""


_SETTLE_S = 2.0
"""After a restart: how long to collect what workers and gateways hold; each of them reports several times in it."""
_MAX_WAITING_REQUESTS = 100_000
"""Of all gateways together. Each bounds what it lets in; this only keeps a mistake there from filling memory."""


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    report_timeout_s: float
    settle_s: float
    load_interval_s: float
    max_waiting_requests: int

    @classmethod
    def of(cls, config: Config) -> ManagerSettings:
        manager = config.manager
        return cls(manager.report_timeout_s, _SETTLE_S, manager.load_interval_s, _MAX_WAITING_REQUESTS)


@dataclass(slots=True)
class _Gateway:
    incarnation: int
    endpoint: str
    last_seen_s: float


@dataclass(slots=True)
class _Worker:
    incarnation: int
    endpoint: str
    view: InstanceView
    last_report_s: float
    held: set[Attempt] = field(default_factory=set)
    """Everything it named."""
    awaiting: set[Attempt] = field(default_factory=set)
    """Of these, the ones whose KV it merely waits for."""
    live: dict[RequestId, _Managed] = field(default_factory=dict)
    """Mirror of `_Managed.live`."""
    fresh: dict[RequestId, tuple[int, int]] = field(default_factory=dict)
    """Sent to it but in no report yet: prefill tokens, context tokens."""

    def count_fresh(self) -> None:
        """What was sent to a worker but is not in its last report counts as load already."""
        self.view.assigned_requests = len(self.fresh)
        self.view.assigned_prefill_tokens = sum(prefill for prefill, _ in self.fresh.values())
        self.view.assigned_context_tokens = sum(context for _, context in self.fresh.values())


@dataclass(slots=True, eq=False)
class _Managed:
    """One live attempt. `live`: instances whose segment has not ended, and since when they are expected to hold it."""

    attempt: Attempt
    gateway: InstanceId
    since_s: float
    request: Request | None = None
    """None for one taken over from workers after a restart."""
    segments: tuple[Segment, ...] = ()
    live: dict[InstanceId, float] = field(default_factory=dict)
    waiting: bool = False
    parked_at: InstanceId = ""
    """Who said that it waits there for late binding, with `parked_positions` computed."""
    parked_positions: int = 0

    @property
    def request_id(self) -> RequestId:
        return self.attempt.request_id


@dataclass(slots=True)
class ManagerCounters:
    submitted: int = 0
    dispatched: int = 0
    finished: int = 0
    displaced: int = 0
    refused: int = 0
    workers_lost: int = 0


class ManagerMachine:
    def __init__(
        self,
        instance: InstanceId,
        incarnation: int,
        settings: ManagerSettings,
        order: seats.PrefillOrder,
        placement: seats.Placement,
        late_binding: seats.LateBinding | None,
        now_s: float,
    ) -> None:
        self.instance = instance
        self.counters = ManagerCounters()
        self._incarnation = incarnation
        self._settings = settings
        self._order = order
        self._placement = placement
        self._late_binding = late_binding
        self._settled_at_s = now_s + settings.settle_s
        self._gateways: dict[InstanceId, _Gateway] = {}
        self._workers: dict[InstanceId, _Worker] = {}
        self._views: dict[InstanceId, InstanceView] | None = None
        self._requests: dict[RequestId, _Managed] = {}
        self._claimed: set[Attempt] = set()
        """Keys of `_requests`."""
        self._unclaimed: dict[Attempt, float] = {}
        """Held by a worker, claimed by no gateway, since when."""
        self._finished: deque[tuple[float, Attempt]] = deque()
        self._finished_keys: set[Attempt] = set()
        self._figures: ClusterFigures | None = None
        self._figures_at_s = 0.0
        self._next_load_s = 0.0
        self._drain_rate = 0.0
        self._finished_at_s = now_s
        self._finished_before = 0
        self._effects: list[Effect] = []

    # -- the host's side ---------------------------------------------------------------------------------------

    def take_effects(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    @property
    def waiting(self) -> int:
        return len(self._order)

    @property
    def live(self) -> int:
        return len(self._requests)

    @property
    def workers(self) -> int:
        return len(self._workers)

    def on_message(self, now_s: float, sender: InstanceId, message: Message) -> bool:
        """False for a message that is not the manager's business."""
        match message:
            case GatewayHello():
                self._gateway_hello(now_s, message)
            case Submit(request=request):
                self._submit(now_s, sender, request)
            case Cancel(attempts=attempts, reason=reason):
                for attempt in attempts:
                    managed = self._requests.get(attempt.request_id)
                    if managed is not None and managed.attempt == attempt:
                        self._forget(now_s, managed, reason)
            case RevisePrediction():
                self._revise(now_s, message)
            case Outstanding(attempts=attempts):
                self._outstanding(now_s, sender, attempts)
            case RegisterWorker():
                self._register(now_s, message)
            case WorkerReport():
                self._report(now_s, message)
            case SegmentEnded():
                self._segment_ended(now_s, message)
            case Leaving(instance=instance, incarnation=incarnation):
                worker = self._workers.get(instance)
                if worker is not None and worker.incarnation == incarnation:
                    self._worker_lost(now_s, instance, "left")
            case ClusterFigures():
                self._figures, self._figures_at_s = message, now_s
            case _:
                return False
        return True

    def peer_unreachable(self, now_s: float, peer: InstanceId) -> None:
        """A send failed. A worker that cannot be reached is dead to us; a gateway will greet again."""
        if peer in self._workers:
            self._worker_lost(now_s, peer, "cannot be reached")

    def tick(self, now_s: float) -> None:
        for instance, worker in list(self._workers.items()):
            worker.view.report_age_s = now_s - worker.last_report_s
            if worker.view.report_age_s > self._settings.report_timeout_s:
                self._worker_lost(now_s, instance, f"silent for {worker.view.report_age_s:.1f} s")
        for instance, gateway in list(self._gateways.items()):
            if now_s - gateway.last_seen_s > self._settings.report_timeout_s:
                self._abandon(now_s, instance, "gateway is silent")
        if now_s >= self._settled_at_s:
            self._cancel_unclaimed(now_s)
        while self._finished and now_s - self._finished[0][0] > _FINISHED_GRACE_S:
            self._finished_keys.discard(self._finished.popleft()[1])
        self.schedule(now_s)
        if now_s >= self._next_load_s:
            self._next_load_s = now_s + self._settings.load_interval_s
            self._send_load(now_s)

    def next_wake_s(self, now_s: float) -> float:
        wake = self._order.next_wake_s(now_s)
        return min(self._next_load_s, wake) if wake is not None else self._next_load_s

    # -- gateways ----------------------------------------------------------------------------------------------

    def _gateway_hello(self, now_s: float, hello: GatewayHello) -> None:
        known = self._gateways.get(hello.instance)
        if known is not None and known.incarnation != hello.incarnation:
            self._abandon(now_s, hello.instance, "gateway restarted")
        self._gateways[hello.instance] = _Gateway(hello.incarnation, hello.endpoint, now_s)
        self._effects.append(Send(hello.instance, ManagerHello(self._incarnation)))

    def _abandon(self, now_s: float, instance: InstanceId, reason: str) -> None:
        """Nobody waits for this gateway's requests any more. It stays known: an idle gateway may be silent."""
        for managed in [m for m in self._requests.values() if m.gateway == instance]:
            self._forget(now_s, managed, reason)

    def _submit(self, now_s: float, sender: InstanceId, request: Request) -> None:
        gateway = self._gateways.get(sender)
        if gateway is None:
            return  # it has not greeted this incarnation yet; it will, and submit again
        gateway.last_seen_s = now_s
        known = self._requests.get(request.request_id)
        if known is not None:
            if known.attempt >= request.attempt:
                return
            self._forget(now_s, known, "superseded")
        self.counters.submitted += 1
        if len(self._order) >= self._settings.max_waiting_requests:
            self._refuse(request, sender, 429, "the manager's queue is full")
            return
        managed = _Managed(request.attempt, sender, now_s, request, waiting=True)
        self._requests[request.request_id] = managed
        self._claimed.add(managed.attempt)
        self._order.add(now_s, WaitingRequest(request, now_s, request.prediction))
        self.schedule(now_s)

    def _revise(self, now_s: float, message: RevisePrediction) -> None:
        managed = self._requests.get(message.request_id)
        if managed is None:
            return
        if managed.request is not None:  # the worker it is sent to later starts from the newest figure
            managed.request = msgspec.structs.replace(managed.request, prediction=message.prediction)
        if managed.waiting:
            self._order.revise(now_s, message.request_id, message.prediction)
        for instance in managed.live:
            self._effects.append(Send(instance, message))

    def _outstanding(self, now_s: float, sender: InstanceId, attempts: Iterable[Attempt]) -> None:
        gateway = self._gateways.get(sender)
        if gateway is None:
            return
        gateway.last_seen_s = now_s
        lost: list[Attempt] = []
        for attempt in attempts:
            managed = self._requests.get(attempt.request_id)
            if managed is not None and managed.attempt >= attempt:
                continue
            if attempt in self._finished_keys:
                continue  # its gateway will hear; a report older than the end must not bring it back
            holders = [name for name, worker in self._workers.items() if attempt in worker.held]
            # Somebody must have its state; a worker that only waits for it may wait for nobody.
            if any(attempt not in self._workers[name].awaiting for name in holders):  # of a former manager
                adopted = _Managed(attempt, sender, now_s)
                self._requests[attempt.request_id] = adopted
                if managed is not None:
                    self._claimed.discard(managed.attempt)
                self._claimed.add(attempt)
                for name in holders:
                    self._engage(now_s, adopted, name)
                self._unclaimed.pop(attempt, None)
            elif now_s >= self._settled_at_s:
                lost.append(attempt)
        if lost:
            self.counters.displaced += len(lost)
            self._effects.append(Send(sender, Displaced(lost, "unknown to the manager and to all workers")))

    # -- workers -----------------------------------------------------------------------------------------------

    def _register(self, now_s: float, message: RegisterWorker) -> None:
        known = self._workers.get(message.instance)
        if known is not None and known.incarnation != message.incarnation:
            self._worker_lost(now_s, message.instance, "restarted")
            known = None
        awaiting = _keys(message.awaiting)
        held = _keys(message.held) | awaiting
        view = InstanceView(message.instance, message.capacity)
        self._views = None
        self._workers[message.instance] = _Worker(message.incarnation, message.endpoint, view, now_s, held, awaiting)
        if known is not None:  # the same process once more: it keeps what it was given
            self._workers[message.instance].live = known.live
        self._note_unclaimed(now_s, held)
        self._effects.append(Send(message.instance, Registered(self._incarnation)))

    def _report(self, now_s: float, report: WorkerReport) -> None:
        worker = self._workers.get(report.instance)
        if worker is None or worker.incarnation != report.incarnation:
            # Thought dead, or never met (we are new): ask it to register.
            self._effects.append(Send(report.instance, ManagerHello(self._incarnation)))
            return
        worker.last_report_s = now_s
        worker.awaiting = _keys(report.awaiting)
        worker.held = _keys(report.held) | worker.awaiting
        view = worker.view
        view.figures = report.figures
        view.report_age_s = 0.0
        if view.draining is not report.draining:
            view.draining = report.draining
            self._views = None
        for managed in list(worker.live.values()):
            if managed.attempt in worker.held:
                worker.fresh.pop(managed.request_id, None)
            elif now_s - managed.live[report.instance] > _HOLD_GRACE_S:
                self._displace(now_s, managed, f"{report.instance} does not hold it any more")
        worker.count_fresh()
        self._note_unclaimed(now_s, worker.held)
        self.schedule(now_s)

    def _note_unclaimed(self, now_s: float, held: set[Attempt]) -> None:
        claimed = self._claimed
        for key in held:
            if key not in claimed:
                self._unclaimed.setdefault(key, now_s)
        for key in [key for key in self._unclaimed if key in claimed]:
            del self._unclaimed[key]

    def _cancel_unclaimed(self, now_s: float) -> None:
        """No gateway names them for as long as one would need to: their owner is gone."""
        patience_s = max(_HOLD_GRACE_S, self._settings.report_timeout_s)
        for key, since_s in list(self._unclaimed.items()):
            holders = [name for name, worker in self._workers.items() if key in worker.held]
            if not holders:
                del self._unclaimed[key]
            elif now_s - since_s > patience_s:
                del self._unclaimed[key]
                for name in holders:
                    self._effects.append(Send(name, Cancel([key], "no gateway owns it")))

    def _worker_lost(self, now_s: float, instance: InstanceId, reason: str) -> None:
        worker = self._workers.pop(instance)
        self._views = None
        self.counters.workers_lost += 1
        for managed in list(worker.live.values()):
            del managed.live[instance]
            self._displace(now_s, managed, f"{instance}: {reason}")

    def _engage(self, now_s: float, managed: _Managed, instance: InstanceId) -> None:
        managed.live[instance] = now_s
        worker = self._workers[instance]
        worker.live[managed.request_id] = managed
        if managed.request is not None:
            tokens = len(managed.request.tokens)
            first = bool(managed.segments) and managed.segments[0].instance == instance
            worker.fresh[managed.request_id] = (tokens if first else 0, tokens)
            worker.count_fresh()

    def _disengage(self, managed: _Managed, instance: InstanceId) -> None:
        managed.live.pop(instance, None)
        worker = self._workers.get(instance)
        if worker is not None and worker.live.get(managed.request_id) is managed:
            del worker.live[managed.request_id]
            if worker.fresh.pop(managed.request_id, None) is not None:
                worker.count_fresh()

    # -- requests ----------------------------------------------------------------------------------------------

    def schedule(self, now_s: float) -> None:
        """Ask the policies what goes where now, and send it."""
        cluster = self._cluster(now_s)
        if len(self._order) and cluster.instances and now_s >= self._settled_at_s:
            for dispatch in self._order.decide(now_s, cluster):
                for request_id in dispatch.request_ids:
                    managed = self._requests.get(request_id)
                    if managed is not None and managed.request is not None and managed.waiting:
                        self._place(now_s, managed, managed.request, dispatch, cluster)
        if self._late_binding is not None:
            for action in self._late_binding.decide(now_s, cluster):
                match action:
                    case seats.Bind():
                        self._bind(now_s, action)
                    case seats.Prefetch():
                        self._prefetch(action)

    def _place(
        self, now_s: float, managed: _Managed, request: Request, dispatch: seats.Dispatch, cluster: ClusterView
    ) -> None:
        waiting = WaitingRequest(request, managed.since_s, request.prediction)
        decision = self._placement.place(now_s, waiting, cluster, dispatch.instance)
        match decision:
            case seats.Wait():
                self._order.add(now_s, waiting)
            case seats.Impossible(reason=reason):
                del self._requests[request.request_id]
                self._claimed.discard(managed.attempt)
                self._refuse(request, managed.gateway, 400, reason)
            case seats.Placed(segments=segments, reason=reason):
                managed.waiting = False
                managed.segments = segments
                self.counters.dispatched += 1
                # Later segments first: their workers know the request when the KV offer comes.
                for index in reversed(range(len(segments))):
                    self._start(now_s, managed, request, index, dispatch.batch_id)
                self._effects.append(
                    Send(
                        managed.gateway,
                        Placed(
                            request.attempt,
                            [segment.instance for segment in segments if segment.instance is not None],
                            now_s - managed.since_s,
                            reason,
                        ),
                    )
                )

    def _start(self, now_s: float, managed: _Managed, request: Request, index: int, batch_id: int) -> None:
        segments = managed.segments
        instance = segments[index].instance
        if instance is None:
            return
        following = segments[index + 1].instance if index + 1 < len(segments) else None
        self._engage(now_s, managed, instance)
        self._effects.append(
            Send(
                instance,
                StartSegment(
                    request,
                    list(segments),
                    index,
                    self._gateways[managed.gateway].endpoint,
                    self._workers[following].endpoint if following is not None else "",
                    batch_id,
                ),
            )
        )

    def _bind(self, now_s: float, action: seats.Bind) -> None:
        managed = self._requests.get(action.request_id)
        worker = self._workers.get(action.instance)
        if managed is None or managed.request is None or worker is None or list(managed.live) != [managed.parked_at]:
            return
        holder, at = managed.parked_at, managed.parked_positions
        managed.parked_at = ""
        # What was parked ends where it was parked; an open end only has the segment that goes on.
        done = [msgspec.structs.replace(each, end=at if each.end is None else each.end) for each in managed.segments]
        if done[-1].instance is None:
            del done[-1]
        following = Segment(at, at if action.parks else None, action.instance)
        managed.segments = (*done, following, Segment(at, None, None)) if action.parks else (*done, following)
        if holder != action.instance:
            self._start(now_s, managed, managed.request, len(done), action.batch_id)
        self._effects.append(Send(holder, BindSegment(managed.attempt, following, worker.endpoint, action.batch_id)))

    def _prefetch(self, action: seats.Prefetch) -> None:
        """To each holder its own, in the order wished for."""
        attempts: dict[InstanceId, list[Attempt]] = {}
        for request_id in action.request_ids:
            managed = self._requests.get(request_id)
            if managed is not None and managed.parked_at:
                attempts.setdefault(managed.parked_at, []).append(managed.attempt)
        for holder, wanted in attempts.items():
            self._effects.append(Send(holder, PrefetchKv(wanted)))

    def _tell_parked(self, now_s: float, managed: _Managed) -> None:
        """Once nobody else holds any of it: a worker on the way here may not have let go yet."""
        if self._late_binding is None or list(managed.live) != [managed.parked_at]:
            return
        if managed.request is None:  # placed by a former manager: nothing to tell the next worker
            self._displace(now_s, managed, "parked for a former manager")
            return
        self._late_binding.parked(
            now_s, seats.ParkedKv(managed.request, managed.parked_at, managed.parked_positions, now_s)
        )

    def _segment_ended(self, now_s: float, message: SegmentEnded) -> None:
        managed = self._requests.get(message.attempt.request_id)
        if managed is None or managed.attempt != message.attempt:
            return
        match message.outcome:
            case "finished":
                self.counters.finished += 1
                self._disengage(managed, message.instance)
                self._finished.append((now_s, managed.attempt))
                self._finished_keys.add(managed.attempt)
                self._placement.completed(now_s, managed.request_id)
                self._forget(now_s, managed, "finished")
            case "handed_over" | "cancelled":
                self._disengage(managed, message.instance)
                if message.outcome == "cancelled" and not managed.live:
                    self._displace(now_s, managed, message.reason)
                elif message.outcome == "handed_over" and self._late_binding is not None:
                    self._late_binding.moved(now_s, managed.request_id)
                    self._tell_parked(now_s, managed)
            case "parked":
                managed.parked_at, managed.parked_positions = message.instance, message.positions
                self._tell_parked(now_s, managed)
            case _:
                self._disengage(managed, message.instance)
                self._displace(now_s, managed, f"{message.instance}: {message.reason}")
        self.schedule(now_s)

    def _displace(self, now_s: float, managed: _Managed, reason: str) -> None:
        """This attempt is lost; its gateway decides how it goes on."""
        self.counters.displaced += 1
        self._forget(now_s, managed, "displaced")
        if managed.gateway in self._gateways:
            self._effects.append(Send(managed.gateway, Displaced([managed.attempt], reason)))

    def _forget(self, now_s: float, managed: _Managed, reason: str) -> None:
        self._requests.pop(managed.request_id, None)
        self._claimed.discard(managed.attempt)
        if managed.waiting:
            self._order.remove(now_s, managed.request_id)
        self._placement.finished(now_s, managed.request_id)
        if self._late_binding is not None:
            self._late_binding.removed(now_s, managed.request_id)
        for instance in list(managed.live):
            self._disengage(managed, instance)
            if instance in self._workers:
                self._effects.append(Send(instance, Cancel([managed.attempt], reason)))

    def _refuse(self, request: Request, gateway: InstanceId, status: int, reason: str) -> None:
        self.counters.refused += 1
        self._effects.append(Send(gateway, Refused(request.attempt, status, reason)))

    # -- what policies and gateways are told -------------------------------------------------------------------

    def _cluster(self, now_s: float) -> ClusterView:
        figures = self._figures
        return ClusterView(
            instances=self._serving(),
            arrival_rate=figures.arrival_rate if figures else 0.0,
            arrival_rate_forecast=figures.arrival_rate_forecast if figures else 0.0,
            mean_prompt_tokens=figures.mean_prompt_tokens if figures else 0.0,
            mean_output_tokens=figures.mean_output_tokens if figures else 0.0,
            forecast_age_s=now_s - self._figures_at_s if figures else float("inf"),
        )

    def _serving(self) -> dict[InstanceId, InstanceView]:
        """Workers that take requests. Built anew only when somebody came, went or drains: policies may keep nothing of
        it, and every event asks."""
        if self._views is None:
            self._views = {name: worker.view for name, worker in self._workers.items() if not worker.view.draining}
        return self._views

    def _send_load(self, now_s: float) -> None:
        interval = now_s - self._finished_at_s
        if interval >= 1.0:
            rate = (self.counters.finished - self._finished_before) / interval
            self._drain_rate = rate if self._drain_rate == 0.0 else 0.8 * self._drain_rate + 0.2 * rate
            self._finished_at_s, self._finished_before = now_s, self.counters.finished
        views = [worker.view for worker in self._workers.values() if not worker.view.draining]
        load = ClusterLoad(
            ready=bool(views) and now_s >= self._settled_at_s,
            instances=[view.instance for view in views],
            waiting=len(self._order),
            waiting_tokens=self._order.waiting_tokens,
            running=len(self._requests) - len(self._order),
            free_tokens=sum(view.free_blocks * view.capacity.block_size for view in views),
            total_tokens=sum(view.capacity.num_blocks * view.capacity.block_size for view in views),
            max_model_len=max((view.capacity.max_model_len for view in views), default=0),
            drain_rate=self._drain_rate,
        )
        for gateway in self._gateways:
            self._effects.append(Send(gateway, load))

    def figures(self) -> dict[str, float]:
        return {
            "waiting": float(len(self._order)),
            "live": float(len(self._requests)),
            "workers": float(len(self._workers)),
            "dispatched_total": float(self.counters.dispatched),
            "finished_total": float(self.counters.finished),
            "displaced_total": float(self.counters.displaced),
            "refused_total": float(self.counters.refused),
            "workers_lost_total": float(self.counters.workers_lost),
            **self._order.metrics(),
            **self._placement.metrics(),
            **(self._late_binding.metrics() if self._late_binding is not None else {}),
        }


def _keys(attempts: Iterable[Attempt]) -> set[Attempt]:
    return set(attempts)
