"""First come, first served over the manager's waiting requests, online before offline, priorities first.

The default `PrefillOrder`: one bucket, batches of one. It sends a bounded amount of prefill work ahead to each worker
and keeps the rest, so that what arrives later with a better priority can still overtake.
"""

from __future__ import annotations

from bisect import bisect_left, insort

from cohort.common.policies.interface import ClusterView, Dispatch, WaitingRequest
from cohort.common.types import Prediction, RequestId

_Key = tuple[int, bool, float, str]


def _key(waiting: WaitingRequest) -> _Key:
    request = waiting.request
    return (request.priority, not request.online, request.arrival_s, request.request_id)


class FirstCome:
    def __init__(self, *, dispatch_ahead_tokens: int) -> None:
        self._ahead = dispatch_ahead_tokens
        self._queue: list[tuple[_Key, WaitingRequest]] = []
        self._by_id: dict[RequestId, _Key] = {}
        self._tokens = 0
        self._next_batch = 1

    def add(self, now_s: float, waiting: WaitingRequest) -> None:
        key = _key(waiting)
        insort(self._queue, (key, waiting), key=lambda entry: entry[0])
        self._by_id[waiting.request_id] = key
        self._tokens += len(waiting.request.tokens)

    def remove(self, now_s: float, request_id: RequestId) -> None:
        key = self._by_id.pop(request_id, None)
        if key is not None:
            _, waiting = self._queue.pop(bisect_left(self._queue, key, key=lambda entry: entry[0]))
            self._tokens -= len(waiting.request.tokens)

    def revise(self, now_s: float, request_id: RequestId, prediction: Prediction) -> None:
        key = self._by_id.get(request_id)
        if key is not None:
            self._queue[bisect_left(self._queue, key, key=lambda entry: entry[0])][1].prediction = prediction

    def decide(self, now_s: float, cluster: ClusterView) -> list[Dispatch]:
        room = [self._ahead - view.queued_prefill_tokens for view in cluster.instances.values() if view.role.prefills]
        if not room:  # no prefill worker alive: decode workers stand in
            room = [self._ahead - view.queued_prefill_tokens for view in cluster.instances.values()]
        dispatches: list[Dispatch] = []
        while self._queue and room and max(room) > 0:
            waiting = self._queue[0][1]
            self.remove(now_s, waiting.request_id)
            # The longest prompts may overshoot: room for one token is room for one request.
            room[room.index(max(room))] -= len(waiting.request.tokens)
            dispatches.append(Dispatch((waiting.request_id,), self._next_batch, None, "first come"))
            self._next_batch += 1
        return dispatches

    def next_wake_s(self, now_s: float) -> float | None:
        return None

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def waiting_tokens(self) -> int:
        return self._tokens

    def figures(self) -> dict[str, float]:
        return {"buckets": 1.0}
