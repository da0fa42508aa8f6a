"""Weighted fair queueing of requests by owner: the owner that has had least for its weight goes next.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996) with the tag kept at the head of each owner's queue: an owner
that begins to wait starts at the virtual time v (or at its own last finish, if that is later); the smallest start goes
next, v becomes that start, and the owner's next start is later by cost / weight. From this follow, whatever arrives:

    shares       while two owners wait all the time, what they were served differs, divided by their weights, by at
                 most one largest request of each
    no debt      an owner that was alone owes nothing for it later, and has saved nothing either
    no idling    whoever waits is served as long as there is something to serve with

Within one owner, requests go by the rank that `add` is given. Knows neither time nor machines.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace, nsmallest
from typing import Any

from cohort.common.types import RequestId

_FORGOTTEN = 64
"""Owners without requests, and entries of gone requests, beyond which they are cleared if in the majority."""


@dataclass(slots=True)
class _Owner:
    weight: float
    start: float
    """Virtual start time of its next request: cost / weight."""
    order: list[tuple[Any, RequestId]] = field(default_factory=list)
    """Heap; entries of requests that are gone are skipped."""
    waiting: dict[RequestId, tuple[Any, float]] = field(default_factory=dict)
    """Rank and cost."""


class FairQueue:
    """Queue whose ranks must be comparable with each other. Costs are positive; tokens, say."""

    def __init__(self) -> None:
        self._owners: dict[str, _Owner] = {}
        self._owner_of: dict[RequestId, str] = {}
        self._now = 0.0
        """Virtual time: the start of the request that went last."""

    def __len__(self) -> int:
        return len(self._owner_of)

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._owner_of

    def add(self, owner: str, request_id: RequestId, *, rank: Any, cost: float, weight: float = 1.0) -> None:
        """Add a request. `weight` counts from the owner's next request on."""
        known = self._owners.get(owner)
        if known is None:
            known = self._owners[owner] = _Owner(weight, self._now)
        elif not known.waiting:
            known.start = max(known.start, self._now)
            known.order.clear()
        known.weight = weight
        known.waiting[request_id] = rank, cost
        heappush(known.order, (rank, request_id))
        self._owner_of[request_id] = owner

    def remove(self, request_id: RequestId) -> bool:
        """Remove a request that was not served; return whether it was here."""
        owner = self._owner_of.pop(request_id, None)
        if owner is None:
            return False
        known = self._owners[owner]
        del known.waiting[request_id]
        if len(known.order) > 2 * len(known.waiting) + _FORGOTTEN:
            known.order = sorted((rank, name) for name, (rank, _) in known.waiting.items())
        return True

    def next(self) -> RequestId | None:
        """Take the request that goes now, charged to its owner; None if nothing waits."""
        waiting = [(known.start, name) for name, known in self._owners.items() if known.waiting]
        if not waiting:
            return None
        _, name = min(waiting)
        owner = self._owners[name]
        while True:
            rank, request_id = heappop(owner.order)
            known = owner.waiting.get(request_id)
            if known is not None and known[0] == rank:
                break
        del owner.waiting[request_id], self._owner_of[request_id]
        self._charge(owner, known[1])
        if len(self._owners) > 2 * len(waiting) + _FORGOTTEN:
            self._forget()
        return request_id

    def first(self, count: int) -> list[RequestId]:
        """Return the requests that `next` would take one after the other, at most `count`. They stay here until each is
        taken or removed."""
        heads = [(known.start, name) for name, known in self._owners.items() if known.waiting]
        heapify(heads)
        orders: dict[str, Iterator[tuple[Any, RequestId]]] = {}
        found: list[RequestId] = []
        while heads and len(found) < count:
            start, name = heads[0]
            owner = self._owners[name]
            if name not in orders:
                ranked = ((rank, request_id) for request_id, (rank, _) in owner.waiting.items())
                orders[name] = iter(nsmallest(count, ranked))
            _, request_id = next(orders[name], (None, None))
            if request_id is None:
                heappop(heads)
                continue
            found.append(request_id)
            heapreplace(heads, (start + owner.waiting[request_id][1] / owner.weight, name))
        return found

    def take(self, request_id: RequestId) -> None:
        """Take this request, charged to its owner."""
        owner = self._owners[self._owner_of[request_id]]
        _, cost = owner.waiting[request_id]
        self.remove(request_id)
        self._charge(owner, cost)
        if len(self._owners) > 2 * len(self._owner_of) + _FORGOTTEN:
            self._forget()

    def _charge(self, owner: _Owner, cost: float) -> None:
        self._now = max(self._now, owner.start)
        owner.start += cost / owner.weight

    def _forget(self) -> None:
        owners = self._owners.items()
        self._owners = {name: known for name, known in owners if known.waiting or known.start > self._now}

    def give_back(self, owner: str, cost: float) -> None:
        """Refund a request that was not served after all; not into the past."""
        known = self._owners.get(owner)
        if known is not None:
            known.start = max(self._now, known.start - cost / known.weight)
