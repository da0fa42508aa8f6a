"""Fair sharing between API keys, around any `PrefillOrder`: it decides whose requests the order gets to see.

    one owner waits      every request goes straight into the order inside, which decides as if this file did not exist
    several owners wait  what none is dispatched yet is taken back into a fair queue; from there as much goes inside as
                         the workers take soon, in turn of the owners' shares, and the order inside picks among that

What is inside at a time is bounded as FCFS bounds it: `ahead_tokens` of prompt on each worker that prefills, dispatched
or not. That keeps workers busy, and makes the share independent of how long the queue was when the second key came. An
order that dispatches everything at once leaves nothing to take back: around it a key that is alone is held back as
well, beyond `alone_tokens` on each worker, or a second one would find all of the first one's queue there.

Requests count with their prompt and the output that is expected of them, those too that placement refuses: free ones
would let a key whose requests are all refused go first for ever. Online requests of all owners go before batch work of
any; within an owner, priority, then class, then arrival. An attempt after the first is not charged and does not wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from cohort.common.policies.fair_queue import FairQueue
from cohort.common.policies.interface import ClusterView, Dispatch, PrefillOrder, WaitingRequest
from cohort.common.types import Prediction, QueueBucket, RequestId

_CONTENTION_MEMORY_S = 2.0
"""Seconds after contention during which an owner that is alone is still held back: taking a long queue back for each
request of another owner would cost more than it is worth."""

_Rank = tuple[int, bool, float, str]


@dataclass(slots=True)
class _Inside:
    """Request that the order inside has."""

    waiting: WaitingRequest
    charged: float
    """Cost charged to its owner; 0 while that owner was alone."""


class FairOrder(PrefillOrder):
    def __init__(
        self, order: PrefillOrder, *, ahead_tokens: int, default_output: float, alone_tokens: int | None = None
    ) -> None:
        """`default_output`: tokens without a prediction. `alone_tokens` None: a lone owner is never held back."""
        self._order = order
        self._ahead = ahead_tokens
        self._alone = alone_tokens
        self._default_output = default_output
        self._online, self._offline = FairQueue(), FairQueue()
        self._held: dict[RequestId, WaitingRequest] = {}
        self._held_tokens = 0
        self._inside: dict[RequestId, _Inside] = {}
        self._inside_tokens = 0
        self._sent: dict[RequestId, _Inside] = {}
        """Requests of the last decision: placement may bring them back."""
        self._owners: Counter[str] = Counter()
        """Number of waiting requests by owner."""
        self.sharing = False
        """Whether several owners wait, or did a moment ago."""
        self._contended_s = float("-inf")
        self._contentions = 0

    def add(self, now_s: float, waiting: WaitingRequest) -> None:
        name = waiting.request_id
        returned = self._sent.pop(name, None)
        self._drop(name)
        self._owners[waiting.request.owner] += 1
        if returned is not None:
            self._put_inside(now_s, waiting, returned.charged)
        elif waiting.accepted or (self._alone is None and not self.sharing):
            self._put_inside(now_s, waiting, 0.0)
        else:
            self._hold(waiting)

    def remove(self, now_s: float, request_id: RequestId) -> None:
        self._sent.pop(request_id, None)
        removed = self._drop(request_id)
        if removed is not None:
            self._give_back(removed)
        self._order.remove(now_s, request_id)

    def revise(self, now_s: float, request_id: RequestId, prediction: Prediction) -> None:
        held = self._held.get(request_id)
        if held is None:
            self._order.revise(now_s, request_id, prediction)
        else:
            held.prediction = prediction

    def __len__(self) -> int:
        return len(self._held) + len(self._order)

    @property
    def waiting_tokens(self) -> int:
        return self._held_tokens + self._order.waiting_tokens

    def next_wake_s(self, now_s: float) -> float | None:
        return self._order.next_wake_s(now_s)

    def buckets(self) -> Seq[QueueBucket]:
        """Return the buckets of the order inside; what is held back here is in none of them."""
        return self._order.buckets()

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the order inside; its own too, from the first contention on."""
        if not self._contentions:
            return self._order.metrics()
        own = {"fair_owners": float(len(self._owners)), "fair_held_requests": float(len(self._held))}
        return {**self._order.metrics(), **own, "fair_contentions": float(self._contentions)}

    def decide(self, now_s: float, cluster: ClusterView) -> list[Dispatch]:
        self._sent.clear()
        self._update_contention(now_s)
        limit = self._ahead if self.sharing else self._alone
        if limit is not None:
            self._release(now_s, cluster, limit)
        dispatches = self._order.decide(now_s, cluster)
        for dispatch in dispatches:
            for name in dispatch.request_ids:
                if (sent := self._drop(name)) is not None:
                    self._sent[name] = sent
        return dispatches

    def _update_contention(self, now_s: float) -> None:
        """Update `sharing`: several owners wait, or did a moment ago."""
        contended = len(self._owners) > 1
        if contended:
            self._contended_s = now_s
        if contended and not self.sharing:
            self.sharing = True
            self._contentions += 1
            self._take_back(now_s)
        elif self.sharing and not contended and now_s - self._contended_s >= _CONTENTION_MEMORY_S:
            self.sharing = False
            for waiting in list(self._held.values()) if self._alone is None else ():
                self._unhold(waiting)
                self._put_inside(now_s, waiting, 0.0)

    def _take_back(self, now_s: float) -> None:
        for name, inside in list(self._inside.items()):
            if not inside.waiting.accepted:
                self._leave(name, inside)
                self._order.remove(now_s, name)
                self._give_back(inside)
                self._hold(inside.waiting)

    def _release(self, now_s: float, cluster: ClusterView, limit: int) -> None:
        """Add as much as the workers take soon: prompts of `limit` tokens each."""
        views = cluster.instances.values()
        prefill = [view for view in views if view.role.prefills] or list(views)
        headroom = sum(max(0, limit - view.queued_prefill_tokens) for view in prefill) - self._inside_tokens
        while headroom > 0 and self._held:
            queue = self._online if len(self._online) else self._offline
            name = queue.next()
            if name is None:
                return
            waiting = self._held[name]
            self._unhold(waiting)
            self._put_inside(now_s, waiting, self._cost(waiting))
            headroom -= len(waiting.request.tokens)

    def _cost(self, waiting: WaitingRequest) -> float:
        return len(waiting.request.tokens) + waiting.expected_output(self._default_output)

    def _queue_of(self, waiting: WaitingRequest) -> FairQueue:
        return self._online if waiting.request.online else self._offline

    def _hold(self, waiting: WaitingRequest) -> None:
        request = waiting.request
        rank: _Rank = (request.priority, request.traffic_class == "be", request.arrival_s, request.request_id)
        self._queue_of(waiting).add(
            request.owner, request.request_id, rank=rank, cost=self._cost(waiting), weight=request.weight
        )
        self._held[request.request_id] = waiting
        self._held_tokens += len(request.tokens)

    def _unhold(self, waiting: WaitingRequest) -> None:
        self._queue_of(waiting).remove(waiting.request_id)
        del self._held[waiting.request_id]
        self._held_tokens -= len(waiting.request.tokens)

    def _put_inside(self, now_s: float, waiting: WaitingRequest, charged: float) -> None:
        self._inside[waiting.request_id] = _Inside(waiting, charged)
        self._inside_tokens += len(waiting.request.tokens)
        self._order.add(now_s, waiting)

    def _give_back(self, inside: _Inside) -> None:
        if inside.charged:
            self._queue_of(inside.waiting).give_back(inside.waiting.request.owner, inside.charged)

    def _leave(self, name: RequestId, inside: _Inside) -> None:
        del self._inside[name]
        self._inside_tokens -= len(inside.waiting.request.tokens)

    def _drop(self, name: RequestId) -> _Inside | None:
        """Remove a request that waits no more, or is added anew; return it with its charge if it was inside."""
        inside, held = self._inside.get(name), self._held.get(name)
        if inside is not None:
            self._leave(name, inside)
        elif held is not None:
            self._unhold(held)
            inside = _Inside(held, 0.0)
        else:
            return None
        owner = inside.waiting.request.owner
        self._owners[owner] -= 1
        if not self._owners[owner]:
            del self._owners[owner]
        return inside
