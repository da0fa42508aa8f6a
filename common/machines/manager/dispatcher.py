"""The manager's dispatch: requests that the order lets go, the placement's answer to each, segments to workers.

    order ─ Dispatch ─▶ placement ─┬▶ segments: StartSegment to each worker, Placed to the gateway
                                   ├▶ wait: back to the order
                                   └▶ impossible, refused: Refused to the gateway

Called by `ManagerMachine`, which says when; `ParkedRequests` starts later segments by it. Decides nothing that a policy
decides.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import assert_never

import msgspec

from cohort.common.machines.manager.manager_counters import ManagerCounters
from cohort.common.machines.manager.roster import Managed, Roster
from cohort.common.messages import Message, Placed, Refused, StartSegment
from cohort.common.policies import interface as policies
from cohort.common.policies.interface import ClusterView, WaitingRequest
from cohort.common.types import InstanceId


class Dispatcher:
    def __init__(
        self,
        roster: Roster,
        order: policies.PrefillOrder,
        placement: policies.Placement,
        counters: ManagerCounters,
        send: Callable[[InstanceId, Message], None],
    ) -> None:
        self._roster = roster
        self._order = order
        self._placement = placement
        self._counters = counters
        self._send = send

    def dispatch(self, now_s: float, cluster: ClusterView) -> None:
        """Place what the order lets go now."""
        for dispatch in self._order.decide(now_s, cluster):
            for request_id in dispatch.request_ids:
                managed = self._roster.requests.get(request_id)
                if managed is not None and managed.item is not None and managed.waiting:
                    self._place(now_s, managed, managed.item, dispatch, cluster)

    def start(self, now_s: float, managed: Managed, item: WaitingRequest, index: int, batch_id: int) -> None:
        """Send a segment of a placed request to its worker, by its index and batch."""
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

    def refuse(self, gateway: InstanceId, refused: Refused) -> None:
        self._counters.refused[refused.cause] = self._counters.refused.get(refused.cause, 0) + 1
        self._send(gateway, refused)

    # -- within ------------------------------------------------------------------------------------------------

    def _place(
        self, now_s: float, managed: Managed, item: WaitingRequest, dispatch: policies.Dispatch, cluster: ClusterView
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
                managed.waiting = False
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
