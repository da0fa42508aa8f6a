"""The manager's side of late binding: computed segments that wait on a worker until a policy says where they go on.

    SegmentEnded(parked) ─▶ parked ─ `LateBinding.decide` ─┬▶ bound: StartSegment to the next worker, BindSegment to
                                                           │  the holder
                                                           └▶ prefetched: PrefetchKv to the holder

Called by `ManagerMachine`, which owns the requests. Without a policy nothing is ever parked on purpose, and every
method does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

import msgspec

from cohort.common.machines.manager.roster import Managed, Roster
from cohort.common.messages import BindSegment, Message, PrefetchKv
from cohort.common.policies.interface import Bind, ClusterView, LateBinding, ParkedKv, Prefetch, WaitingRequest
from cohort.common.types import Attempt, InstanceId, RequestId, Segment


class ParkedRequests:
    def __init__(
        self,
        roster: Roster,
        policy: LateBinding | None,
        send: Callable[[InstanceId, Message], None],
        start: Callable[[float, Managed, WaitingRequest, int, int], None],
        lost: Callable[[float, Managed, str], None],
    ) -> None:
        """`start` sends a segment to its worker, by its index and batch; `lost` gives an attempt back."""
        self._roster = roster
        self._policy = policy
        self._send = send
        self._start = start
        self._lost = lost

    @property
    def binds(self) -> bool:
        """Whether there is a policy to ask at all."""
        return self._policy is not None

    def came(self, now_s: float, managed: Managed, instance: InstanceId, positions: int) -> bool:
        """A worker says that it keeps so many computed positions. False: it has said so before."""
        if managed.parked_at == instance:
            return False
        managed.parked_at, managed.parked_positions = instance, positions
        self._tell(now_s, managed)
        return True

    def moved(self, now_s: float, managed: Managed) -> None:
        """A KV transfer of this request has arrived."""
        if self._policy is not None:
            self._policy.moved(now_s, managed.request_id)
            self._tell(now_s, managed)

    def removed(self, now_s: float, request_id: RequestId) -> None:
        """The request ended or was lost."""
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

    # -- within ------------------------------------------------------------------------------------------------

    def _tell(self, now_s: float, managed: Managed) -> None:
        """Once no other worker holds any of it: one on the way here may not have let go yet."""
        if self._policy is None or list(managed.live) != [managed.parked_at]:
            return
        if managed.item is None:  # placed by a former manager: nothing to tell the next worker
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
        """To each holder its own, in the order wanted."""
        attempts: dict[InstanceId, list[Attempt]] = {}
        for request_id in action.request_ids:
            managed = self._roster.requests.get(request_id)
            if managed is not None and managed.parked_at:
                attempts.setdefault(managed.parked_at, []).append(managed.attempt)
        for holder, wanted in attempts.items():
            self._send(holder, PrefetchKv(wanted))
