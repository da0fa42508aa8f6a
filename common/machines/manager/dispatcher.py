"""Placement of requests: released by the order (`Dispatcher`), parked on a worker (`ParkedRequests`), on a worker that
drains (`Evacuation`). Called by `ManagerMachine`. Decides nothing that a policy decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import assert_never

import msgspec

from cohort.common.machines.manager.roster import ManagedAttempt, Roster
from cohort.common.messages import BindSegment, Message, Placed, PrefetchKv, Refused, StartSegment
from cohort.common.policies import interface as policies
from cohort.common.policies.interface import (
    Bind,
    ClusterView,
    Dispatch,
    InstanceView,
    LateBinding,
    ParkedKv,
    Prefetch,
    WaitingRequest,
)
from cohort.common.types import Attempt, InstanceId, RequestId, Segment


@dataclass(slots=True)
class ManagerCounters:
    """Totals since start. `refused`: by cause, as in `Refused`. `demoted`: placed as best-effort for their TTFT."""

    submitted: int = 0
    dispatched: int = 0
    finished: int = 0
    attempts_lost: int = 0
    refused: dict[str, int] = field(default_factory=dict)
    demoted: int = 0
    workers_lost: int = 0
    takeovers: int = 0
    """Times that this manager began to lead in place of another one."""
    misnamed: int = 0
    """Messages dropped because only another peer than their sender may send them."""

    def metrics(self) -> dict[str, float]:
        counted = ("dispatched", "finished", "attempts_lost", "demoted", "workers_lost", "takeovers", "misnamed")
        return {
            **{f"{name}_total": float(getattr(self, name)) for name in counted},
            "refused_total": float(sum(self.refused.values())),
            **{f"refused_{cause}_total": float(count) for cause, count in sorted(self.refused.items())},
        }


@dataclass(slots=True, eq=False)
class Dispatcher:
    """Path of released requests: the placement's decision about each, then segments to workers.

    order ─ Dispatch ─▶ placement ─┬▶ segments: StartSegment to each worker, Placed to the gateway
                                   ├▶ wait: back to the order
                                   └▶ impossible, refused: Refused to the gateway
    """

    _roster: Roster
    _order: policies.PrefillOrder
    _placement: policies.Placement
    _counters: ManagerCounters
    _send: Callable[[InstanceId, Message], None]

    def dispatch(self, now_s: float, cluster: ClusterView) -> None:
        for dispatch in self._order.decide(now_s, cluster):
            for request_id in dispatch.request_ids:
                managed = self._roster.requests.get(request_id)
                if managed is not None and managed.item is not None and managed.queued:
                    self._place(now_s, managed, managed.item, dispatch, cluster)

    def start(self, now_s: float, managed: ManagedAttempt, item: WaitingRequest, index: int, batch_id: int) -> None:
        """Send a segment of a placed request to its worker, by its index and batch."""
        segments, request = managed.segments, item.request
        if request.waited_s:  # resubmitted: its place in line is that of its first attempt
            request = msgspec.structs.replace(request, waited_s=request.waited_s + now_s - item.since_s)
        instance = segments[index].instance
        if instance is None:
            return
        following = segments[index + 1].instance if index + 1 < len(segments) else None
        self._roster.assign(now_s, managed, instance)
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

    def refuse(self, gateway: InstanceId, refused: Refused) -> None:
        self._counters.refused[refused.cause] = self._counters.refused.get(refused.cause, 0) + 1
        self._send(gateway, refused)

    def _place(
        self, now_s: float, managed: ManagedAttempt, item: WaitingRequest, dispatch: Dispatch, cluster: ClusterView
    ) -> None:
        assert not managed.live, f"{managed.attempt} is placed and is on {[*managed.live]}"
        decision = self._placement.place(now_s, item, cluster, dispatch.instance)
        match decision:
            case policies.Wait():
                self._order.add(now_s, item)
            case policies.Impossible(reason=reason):
                self._roster.remove(managed)
                self.refuse(managed.gateway, Refused(managed.attempt, 400, reason, "impossible"))
            case policies.Refuse() if item.accepted:
                self._order.add(now_s, item)
            case policies.Refuse(reason=cause, retry_after_s=retry_after_s, forecast_s=forecast_s):
                self._roster.remove(managed)
                self._placement.finished(now_s, managed.request_id)
                refused = Refused(managed.attempt, 429, "the server is busy", cause, retry_after_s, forecast_s)
                self.refuse(managed.gateway, refused)
            case policies.Placed(segments=segments, reason=reason, forecast_s=forecast_s):
                assert segments and segments[0].start == 0, f"{managed.attempt} is placed as {segments}"
                assert all(one.end == other.start for one, other in pairwise(segments)), (
                    f"{managed.attempt}: its segments are not one behind the other: {segments}"
                )
                managed.queued = False
                managed.segments = segments
                self._counters.dispatched += 1
                demoted = decision.best_effort and not item.accepted
                if demoted:
                    item.request = item.request.as_best_effort()
                    self._counters.demoted += 1
                # Later segments first: their workers know the request when the KV offer comes.
                for index in reversed(range(len(segments))):
                    self.start(now_s, managed, item, index, dispatch.batch_id)
                instances = [segment.instance for segment in segments if segment.instance is not None]
                queued_s = now_s - item.since_s
                self._send(managed.gateway, Placed(managed.attempt, instances, queued_s, reason, demoted, forecast_s))
            case _:
                assert_never(decision)


@dataclass(slots=True, eq=False)
class ParkedRequests:
    """Late binding: computed segments that wait on a worker until a policy says where they go on.

        SegmentEnded(parked) ─▶ parked ─ `LateBinding.decide` ─┬▶ bound: StartSegment to the next worker, BindSegment
                                                               │  to the holder
                                                               └▶ prefetched: PrefetchKv to the holder

    Without a policy nothing is ever parked on purpose, and every method does nothing.
    """

    _roster: Roster
    _policy: LateBinding | None
    _send: Callable[[InstanceId, Message], None]
    _start: Callable[[float, ManagedAttempt, WaitingRequest, int, int], None]
    _lost: Callable[[float, ManagedAttempt, str], None]
    """`ManagerMachine._reschedule`: gives an attempt back."""

    @property
    def binds(self) -> bool:
        return self._policy is not None

    def on_parked(self, now_s: float, managed: ManagedAttempt, instance: InstanceId, positions: int) -> bool:
        """Record that a worker holds the computed positions parked. Return False if that was known."""
        if managed.parked_at == instance:
            return False
        managed.parked_at, managed.parked_positions = instance, positions
        self._offer_to_policy(now_s, managed)
        return True

    def moved(self, now_s: float, managed: ManagedAttempt) -> None:
        if self._policy is not None:
            self._policy.moved(now_s, managed.request_id)
            self._offer_to_policy(now_s, managed)

    def removed(self, now_s: float, request_id: RequestId) -> None:
        if self._policy is not None:
            self._policy.removed(now_s, request_id)

    def decide(self, now_s: float, cluster: ClusterView) -> None:
        if self._policy is None:
            return
        for action in self._policy.decide(now_s, cluster):
            match action:
                case Bind():
                    self._bind(now_s, action)
                case Prefetch():
                    self._prefetch(action)
                case _:
                    assert_never(action)

    def metrics(self) -> dict[str, float]:
        return {} if self._policy is None else self._policy.metrics()

    def _offer_to_policy(self, now_s: float, managed: ManagedAttempt) -> None:
        """Report the request to the policy, once no other worker holds any of it: one on the way here may still."""
        if self._policy is None or list(managed.live) != [managed.parked_at]:
            return
        if managed.item is None:  # placed by a former manager: nothing to send to the next worker
            self._lost(now_s, managed, "parked for a former manager")
            return
        request = managed.item.request
        self._policy.parked(now_s, ParkedKv(request, managed.parked_at, managed.parked_positions, now_s))

    def _bind(self, now_s: float, action: Bind) -> None:
        managed = self._roster.requests.get(action.request_id)
        worker = self._roster.workers.get(action.instance)
        if managed is None or managed.item is None or worker is None or list(managed.live) != [managed.parked_at]:
            return
        holder, at = managed.parked_at, managed.parked_positions
        assert holder, f"{managed.attempt} is bound and not parked"
        managed.parked_at = ""
        # A parked segment ends where it was parked; an open end only has the segment that goes on.
        done = [msgspec.structs.replace(each, end=at if each.end is None else each.end) for each in managed.segments]
        if done[-1].instance is None:
            del done[-1]
        following = Segment(at, at if action.parks else None, action.instance)
        managed.segments = (*done, following, Segment(at, None, None)) if action.parks else (*done, following)
        if holder != action.instance:
            self._start(now_s, managed, managed.item, len(done), action.batch_id)
        self._send(holder, BindSegment(managed.attempt, following, worker.endpoint, action.batch_id))

    def _prefetch(self, action: Prefetch) -> None:
        attempts: dict[InstanceId, list[Attempt]] = {}
        for request_id in action.request_ids:
            managed = self._roster.requests.get(request_id)
            if managed is not None and managed.parked_at:
                attempts.setdefault(managed.parked_at, []).append(managed.attempt)
        for holder, wanted in attempts.items():
            self._send(holder, PrefetchKv(wanted))


@dataclass(slots=True, eq=False)
class Evacuation:
    """Evacuation of a worker that drains: what runs there goes on at another one, with its KV.

        WorkerReport(draining) ─▶ each request that is on that worker alone ─┬▶ StartSegment to the worker that takes it
                                                                             └▶ BindSegment to the one that drains

    A request that no other worker has the blocks for stays until a later report, and at the end of the drain is placed
    anew like that of any lost worker. One whose next segment is on another worker goes there by itself. Placements that
    move no KV have no links, and all stay.
    """

    _roster: Roster
    _send: Callable[[InstanceId, Message], None]
    _start: Callable[[float, ManagedAttempt, WaitingRequest, int, int], None]
    _moves_kv: bool

    def reported(self, now_s: float, instance: InstanceId) -> None:
        """Move the worker's requests if it drains. Called after each of its reports."""
        worker = self._roster.workers.get(instance)
        if worker is None or not worker.view.draining or not self._moves_kv:
            return
        others = self._roster.serving()
        for managed in list(worker.live.values()):
            # One that is parked goes on where late binding says.
            if managed.item is None or managed.parked_at or list(managed.live) != [instance]:
                continue
            target = _target(managed.item, others)
            if target is not None:
                self._move(now_s, managed, managed.item, instance, target)

    def _move(
        self, now_s: float, managed: ManagedAttempt, item: WaitingRequest, holder: InstanceId, target: InstanceId
    ) -> None:
        """Move one request. The holder knows where exactly it goes on; until its offer, the submitted tokens count."""
        assert target != holder and holder in managed.live, f"{managed.attempt} goes from {holder} to {target}"
        last = managed.segments[-1]
        at = max(last.start, len(item.request.tokens))
        current, following = msgspec.structs.replace(last, end=at, instance=holder), Segment(at, None, target)
        managed.segments = (*managed.segments[:-1], current, following)
        self._start(now_s, managed, item, len(managed.segments) - 1, 0)
        self._send(holder, BindSegment(managed.attempt, following, self._roster.workers[target].endpoint))


def _target(item: WaitingRequest, others: Mapping[InstanceId, InstanceView]) -> InstanceId | None:
    """Return the least busy worker with blocks for all of it, preferably one whose role decodes; else None."""
    need = len(item.request.tokens) + item.expected_output(0.0)
    able = [
        view
        for view in others.values()
        if view.capacity.geometry.positions(view.free_blocks) - view.assigned_context_tokens >= need
        and item.request.max_positions <= view.capacity.max_model_len
    ]
    best = min(able, key=lambda view: (not view.role.decodes, _busy(view), view.instance), default=None)
    return None if best is None else best.instance


def _busy(view: InstanceView) -> int:
    return view.stats.running + view.stats.waiting + view.stats.awaiting_kv + view.assigned_requests
