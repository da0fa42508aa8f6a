"""First come, first served over the manager's waiting requests, online before offline, priorities first.

It sends a bounded amount of prefill work ahead to each worker and keeps the rest, so that a later request with a better
priority can still overtake.
"""

from __future__ import annotations

from heapq import heappop, heappush

from cohort.common.policies.interface import ClusterView, Dispatch, PrefillOrder, WaitingRequest
from cohort.common.policies.serving_views import MinIndex, ServingViews
from cohort.common.types import Prediction, RequestId, Role

_Key = tuple[int, bool, float, str]
_FORGOTTEN = 64
"""Stale entries of the order beyond which, when they also are the majority, it is made anew."""


class Fcfs(PrefillOrder):
    reads_queues = False

    def __init__(self, *, dispatch_ahead_tokens: int) -> None:
        self._ahead = dispatch_ahead_tokens
        self._least = MinIndex(
            lambda view: (view.queued_prefill_tokens, view.instance),
            lambda view: view.capacity.role is not Role.DECODE,
            or_all=True,
        )
        # A heap whose entries are forgotten, not removed, when a request goes: one with another key in `_waiting`, or
        # none, is stale.
        self._order: list[_Key] = []
        self._waiting: dict[RequestId, tuple[_Key, WaitingRequest]] = {}
        self._tokens = 0
        self._next_batch = 1

    def add(self, now_s: float, waiting: WaitingRequest) -> None:
        request = waiting.request
        key = (request.priority, not request.online, request.arrival_s, request.request_id)
        heappush(self._order, key)
        self._waiting[request.request_id] = key, waiting
        self._tokens += len(request.tokens)

    def remove(self, now_s: float, request_id: RequestId) -> None:
        _, waiting = self._waiting.pop(request_id, (None, None))
        if waiting is not None:
            self._tokens -= len(waiting.request.tokens)
            if len(self._order) > 2 * len(self._waiting) + _FORGOTTEN:
                self._order = sorted(key for key, _ in self._waiting.values())

    def revise(self, now_s: float, request_id: RequestId, prediction: Prediction) -> None:
        if request_id in self._waiting:
            self._waiting[request_id][1].prediction = prediction

    def decide(self, now_s: float, cluster: ClusterView) -> list[Dispatch]:
        ahead, views = self._ahead, cluster.instances
        headroom: list[int] = []
        if isinstance(views, ServingViews):
            least = self._least.of(views)
            if least is None or ahead <= least.queued_prefill_tokens:
                return []
            if len(self._waiting) == 1:  # nearly always: no other is left to look at
                headroom = [ahead - least.queued_prefill_tokens]
        if not headroom:
            headroom = [  # `queued_prefill_tokens` written out: a thousand instances are asked for every request
                ahead - view.stats.queued_prefill_tokens - view.assigned_prefill_tokens
                for view in views.values()
                if view.capacity.role is not Role.DECODE
            ]
        if not headroom:  # no prefill worker alive: decode workers stand in
            headroom = [ahead - view.queued_prefill_tokens for view in views.values()]
        dispatches: list[Dispatch] = []
        while self._waiting and headroom and (most := max(headroom)) > 0:
            key = heappop(self._order)
            known, waiting = self._waiting.get(key[-1], (None, None))
            if waiting is None or known != key:
                continue
            self.remove(now_s, waiting.request_id)
            # The longest prompts may overshoot: room for one token is room for one request.
            headroom[headroom.index(most)] -= len(waiting.request.tokens)
            dispatches.append(Dispatch((waiting.request_id,), self._next_batch, None, "first come"))
            self._next_batch += 1
        return dispatches

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def waiting_tokens(self) -> int:
        return self._tokens

    def metrics(self) -> dict[str, float]:
        return {"buckets": 1.0}
