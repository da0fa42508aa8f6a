"""A2-A9 at the manager: which parked KV goes to which decode worker, when, and in whose company.

A `LateBinding`. After every event it looks at every decode worker once:

    A8  is a request in the pool due?    the batch around it becomes the candidate, and joins before all others
    A7  what matches the running batch?  to the Candidate Requests Buffer
    A6  case 1: room, candidate requests → they join           case 2: room, and none of them → the switch
    A4  no candidate batch?              the next one from the quad-tree to the Candidate Batch Buffer, prefetched (A9)

A6's case 3, the eviction, happens on the worker (`AlignedBatching`); evicted requests come back here as parked and go
to a prefill worker's buffer. No decode iteration waits for the manager (A10). Never moves anything itself.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain

from cohort.common.policies.alignedserve.batch_numbers import FIRST_BATCH
from cohort.common.policies.alignedserve.density_first_search import density_first_search, starved_batch
from cohort.common.policies.alignedserve.quad_tree import PooledRequest, QuadTree
from cohort.common.policies.alignedserve.thresholds import Thresholds, patience_s
from cohort.common.policies.interface import Bind, ClusterView, InstanceView, LateBinding, ParkedKv, Prefetch
from cohort.common.policies.settings import AlignedServeSettings
from cohort.common.types import InstanceId, KvGeometry, RequestId, Role, WorkerStats

_LONGEST_PREFIX = 65_536
"""Tokens that the quad-tree covers; longer prefixes count as this long. Five levels over a leaf of 64."""
_SLACK = 0.25
"""Share beyond the running batch's shortest and longest prefix that still matches it: with more, short rows wait for
long ones again; with less, few requests match."""
_BUFFER_SHARE = 0.4
"""Share of a prefill worker's blocks for candidate batch and candidate requests: as much as a batch (B_max)."""
_STARVATION_SHARE = 0.5
"""Share of the time that a request's TPOT target gives all of its output; the rest is for decoding."""


@dataclass(slots=True)
class RunningBatch:
    """A5, A6, A7 · The requests that one decode worker runs and is going to run, as the manager knows them.

        pool (quad-tree) ──A4──▶ candidate batch ──switch──┐
              └──────────A7──▶ candidate requests ─────────┴─▶ running batch ─▶ finished, or evicted to the pool

    Counts what the worker's last report does not contain: requests bound, arrived or gone since.
    """

    batch_id: int = 0
    members: dict[RequestId, int] = field(default_factory=dict)
    """Last reported prefix lengths of the batch that came out of the tree. Requests that joined as matches are left
    out: a range that grows with every match would end up covering all lengths."""
    requests: deque[PooledRequest] = field(default_factory=deque)
    """A5 · The Candidate Requests Buffer: matches of the running batch."""
    candidate: deque[PooledRequest] = field(default_factory=deque)
    """A5 · The Candidate Batch Buffer: the next batch."""
    candidate_id: int = 0
    starved: bool = False
    """The candidate batch is due (A8): it joins before all other requests."""
    switching: bool = False
    """Part of the candidate batch runs already."""
    due_s: float = math.inf
    """Earliest due time in the candidate batch."""
    moving: dict[RequestId, int] = field(default_factory=dict)
    """Blocks of bound requests that have not arrived."""
    arrived: dict[RequestId, int] = field(default_factory=dict)
    """Blocks of requests that arrived since the last report."""
    freed_blocks: int = 0
    """Blocks of requests that left since the last report."""
    freed_rows: int = 0
    _contexts: dict[RequestId, int] = field(default_factory=dict)
    _stats: WorkerStats | None = None

    def refresh(self, view: InstanceView) -> None:
        """Take over a new report, once."""
        if self._stats is view.stats:
            return
        self._stats = view.stats
        self.arrived.clear()
        self.freed_blocks = self.freed_rows = 0
        self._contexts = {work.request_id: work.context for work in view.stats.queue}
        for request_id, positions in self.members.items():
            self.members[request_id] = max(positions, self._contexts.get(request_id, 0))

    def bound(self, item: PooledRequest) -> None:
        self.moving[item.request_id] = item.blocks

    def has_arrived(self, request_id: RequestId) -> None:
        blocks = self.moving.pop(request_id, None)
        if blocks is not None:
            self.arrived[request_id] = blocks

    def on_removed(self, request_id: RequestId, geometry: KvGeometry) -> None:
        """Drop a request that ended, was lost or was evicted."""
        self.members.pop(request_id, None)
        if self.moving.pop(request_id, None) is None and self.arrived.pop(request_id, None) is None:
            positions = self._contexts.pop(request_id, 0)
            if positions:
                self.freed_blocks += geometry.blocks_held(positions)
                self.freed_rows += 1

    def rows(self, view: InstanceView) -> int:
        """Return the number of requests that run there or will shortly."""
        reported = view.stats.running + view.stats.waiting - self.freed_rows
        return max(0, reported) + len(self.moving) + len(self.arrived)

    def stuck(self, view: InstanceView) -> bool:
        """Return whether no request runs and a waiting one, there or on the way, does not get its blocks."""
        if view.stats.running or self.arrived:
            return False
        first = next(iter(self.moving.values()), None)  # grants are given in order
        return view.stats.waiting > 0 if first is None else first > view.free_blocks

    def free_blocks(self, view: InstanceView) -> int:
        reserved = sum(self.moving.values()) + sum(self.arrived.values())
        return min(view.free_blocks + self.freed_blocks, view.capacity.num_blocks) - reserved

    def span(self, slack: float) -> tuple[int, int] | None:
        """A7 · Return the range of prefix lengths that match the running batch, `slack` of it beyond either end; None
        if no request runs. A tenth at either end does not count: one long prefix among short ones would make every
        request match."""
        if not self.members:
            return None
        lengths = sorted(self.members.values())
        edge = len(lengths) // 10
        return max(1, int(lengths[edge] * (1.0 - slack))), int(lengths[-1 - edge] * (1.0 + slack))


class AlignedBinding(LateBinding):
    def __init__(self, options: AlignedServeSettings, *, default_output: float) -> None:
        """`default_output`: tokens expected of a request without a prediction."""
        self._options, self._default_output = options, default_output
        self._thresholds = Thresholds(options)
        aligned = options.aligned  # without: one batch without end, first come, first served
        self._tree = QuadTree(longest=_LONGEST_PREFIX, leaf_tokens=options.leaf_tokens if aligned else _LONGEST_PREFIX)
        self._batches: dict[InstanceId, RunningBatch] = {}
        self._decode_of: dict[RequestId, InstanceId] = {}
        """Decode worker that runs the request or has it as a candidate."""
        self._fresh: list[ParkedKv] = []
        """Requests parked since the last decision."""
        self._evicted: dict[RequestId, InstanceId] = {}
        """Decode worker that evicted the request, which is on its way to a buffer."""
        self._waiting_since_s: dict[RequestId, tuple[float, float]] = {}
        """Time of a request's first parking, and its due time. Evictions change neither."""
        self._fetched: dict[RequestId, tuple[InstanceId, int]] = {}
        """Holder and blocks of each prefetched request."""
        self._geometry = KvGeometry(1, 1, 1, 1, 16)
        self._views: Mapping[InstanceId, InstanceView] = {}
        self._actions: list[Bind | Prefetch] = []
        """Actions of the current decision."""
        self._next_batch = FIRST_BATCH
        self._made = self._joined = self._switches = self._starved = self._evictions = 0

    # -- events ------------------------------------------------------------------------------------------------

    def parked(self, now_s: float, item: ParkedKv) -> None:
        self._fresh.append(item)

    def moved(self, now_s: float, request_id: RequestId) -> None:
        instance = self._decode_of.get(request_id)
        if instance is not None and instance in self._batches:
            self._batches[instance].has_arrived(request_id)

    def removed(self, now_s: float, request_id: RequestId) -> None:
        self._tree.remove(request_id)
        self._waiting_since_s.pop(request_id, None)
        self._evicted.pop(request_id, None)
        self._fetched.pop(request_id, None)
        self._fresh = [item for item in self._fresh if item.request.request_id != request_id]
        instance = self._decode_of.pop(request_id, None)
        batch = self._batches.get(instance) if instance is not None else None
        if batch is not None:
            batch.requests = deque(item for item in batch.requests if item.request_id != request_id)
            batch.candidate = deque(item for item in batch.candidate if item.request_id != request_id)
            batch.on_removed(request_id, self._geometry)

    def decide(self, now_s: float, cluster: ClusterView) -> list[Bind | Prefetch]:
        views = self._views = cluster.instances
        decodes = [v for v in views.values() if v.role.decodes] or list(views.values())
        for instance in [name for name in self._batches if all(v.instance != name for v in decodes)]:
            lost = self._batches.pop(instance)
            self._give_back([*lost.requests, *lost.candidate])
        if not decodes:
            return []
        self._geometry = decodes[0].capacity.geometry
        self._actions = []
        for item in self._fresh:
            self._take_in(item)
        self._fresh.clear()
        if not self._tree and not any(b.requests or b.candidate for b in self._batches.values()):
            return self._actions
        # The batch with most headroom chooses first.
        for view in sorted(decodes, key=lambda v: (-v.free_blocks, v.instance)):
            batch = self._batches.setdefault(view.instance, RunningBatch())
            batch.refresh(view)
            self._advance(now_s, view, batch)
        return self._actions

    # -- the pool ----------------------------------------------------------------------------------------------

    def _take_in(self, item: ParkedKv) -> None:
        request_id = item.request.request_id
        since_s, due_s = self._waiting_since_s.get(request_id, (item.since_s, 0.0))
        if not due_s:
            due_s = item.since_s + patience_s(
                item.request,
                share=_STARVATION_SHARE,
                longest_s=self._options.starvation_s,
                default_output=self._default_output,
            )
            self._waiting_since_s[request_id] = (since_s, due_s)
        blocks = self._geometry.blocks_held(item.positions)
        pooled = PooledRequest(request_id, item.positions, blocks, since_s, due_s, item.instance)
        decode = self._decode_of.pop(request_id, None)
        batch, view = self._batches.get(item.instance), self._views.get(item.instance)
        if batch is not None and (decode == item.instance or (view is not None and view.role is Role.DECODE)):
            # A decode worker has evicted it: to the buffer of the prefill worker with most room.
            batch.on_removed(request_id, self._geometry)
            prefills = [v for v in self._views.values() if v.role.prefills and v.instance != item.instance]
            target = max(prefills, key=lambda v: (v.free_blocks, v.instance), default=None)
            # Half of that cache stays free for prompts: full caches wait for each other's blocks.
            if target is not None and target.free_blocks - blocks >= target.capacity.num_blocks // 2:
                self._evictions += 1
                self._evicted[request_id] = item.instance
                evicted = Bind(request_id, target.instance, 0, "evicted: the longest makes room", parks=True)
                self._actions.append(evicted)
                return
        origin = self._batches.get(self._evicted.pop(request_id, ""))
        span = origin.span(_SLACK) if origin is not None else None
        if origin is not None and span is not None and span[0] <= item.positions <= span[1]:
            origin.requests.append(pooled)
            self._decode_of[request_id] = next(name for name, each in self._batches.items() if each is origin)
        else:
            self._tree.insert(pooled)

    def _give_back(self, items: Iterable[PooledRequest]) -> None:
        for item in items:
            del self._decode_of[item.request_id]
            self._tree.insert(item)

    # -- one decode worker -------------------------------------------------------------------------------------

    def _advance(self, now_s: float, view: InstanceView, batch: RunningBatch) -> None:
        if batch.stuck(view):
            self._unblock(view, batch)
        due = self._tree.due_s(QuadTree.ROOT) <= now_s
        if batch.candidate and batch.due_s <= now_s:
            batch.starved = True
        if due and not batch.starved and not batch.switching:
            self._give_back(batch.candidate)
            batch.candidate.clear()
            self._choose(now_s, view, batch)
        if not batch.starved and not batch.switching:
            self._match(view, batch)
            self._join(batch.requests, view, batch, "matches the running batch")
        if not batch.candidate:
            batch.starved = batch.switching = False
            # A batch below B_max may take any requests, however few; else they wait until they are enough for a batch.
            small = view.capacity.num_blocks - batch.free_blocks(view) < self._thresholds.max_blocks(view.capacity)
            if small or len(self._tree) >= self._thresholds.min_requests(view.capacity):
                self._choose(now_s, view, batch)
        if batch.candidate and (batch.starved or batch.switching or not batch.requests):
            self._switch(view, batch)
        if self._options.prefetch:
            self._fetch(batch.requests)
            self._fetch(batch.candidate)

    def _unblock(self, view: InstanceView, batch: RunningBatch) -> None:
        """Continue a request whose parked KV lies on this worker: another one waits for blocks there, and none runs.
        The KV's request may be in the pool, or in a buffer of any worker."""
        buffers = [buffer for each in self._batches.values() for buffer in (each.requests, each.candidate)]
        for item in [*chain.from_iterable(buffers), *self._tree.items(QuadTree.ROOT)]:
            if item.holder == view.instance:
                self._tree.remove(item.request_id)
                for buffer in buffers:
                    if item in buffer:
                        buffer.remove(item)
                self._decode_of[item.request_id] = view.instance
                batch.bound(item)
                batch.has_arrived(item.request_id)
                self._joined += 1
                bind = Bind(item.request_id, view.instance, batch.batch_id, "its worker has nothing to run")
                self._actions.append(bind)
                return

    def _choose(self, now_s: float, view: InstanceView, batch: RunningBatch) -> None:
        """A4, A8 · Choose the next candidate batch from the tree."""
        thresholds = self._thresholds
        most, least = thresholds.max_blocks(view.capacity), thresholds.min_requests(view.capacity)
        rows = view.capacity.max_rows
        chosen = starved_batch(self._tree, now_s, max_blocks=most, min_requests=least, max_requests=rows)
        chosen.sort(key=lambda item: (item.due_s, item.since_s, item.request_id))  # starved requests join first
        batch.starved = bool(chosen)
        self._starved += batch.starved
        chosen = chosen or density_first_search(self._tree, max_blocks=most, min_requests=least, max_requests=rows)
        chosen = chosen or self._take_over(view, batch)
        if not chosen:
            return
        self._made += 1
        batch.due_s = min(item.due_s for item in chosen)
        batch.candidate_id = self._next_batch
        self._next_batch += 1
        for item in chosen:
            self._tree.remove(item.request_id)
            self._decode_of[item.request_id] = view.instance
            batch.candidate.append(item)

    def _take_over(self, view: InstanceView, batch: RunningBatch) -> list[PooledRequest]:
        """Take the candidate batch of another decode worker, which is busy with its own: the pool is empty."""
        other = next((b for b in self._batches.values() if b is not batch and b.candidate and not b.switching), None)
        if other is None or batch.rows(view):
            return []
        chosen = list(other.candidate)
        other.candidate.clear()
        return chosen

    def _match(self, view: InstanceView, batch: RunningBatch) -> None:
        """A7 · Add matching pool requests to the buffer, the longest waiting first, up to half a batch: they are no
        longer free for a batch of their own."""
        span = batch.span(_SLACK) if self._options.aligned else (1, _LONGEST_PREFIX)
        if span is None or batch.requests or not len(self._tree):
            return
        headroom = self._thresholds.max_blocks(view.capacity) // 2
        found = sorted(self._tree.between(*span), key=lambda item: (item.since_s, item.request_id))
        for item in found:
            if item.blocks > headroom and batch.requests:
                break
            headroom -= item.blocks
            self._tree.remove(item.request_id)
            self._decode_of[item.request_id] = view.instance
            batch.requests.append(item)

    def _switch(self, view: InstanceView, batch: RunningBatch) -> None:
        """Start the candidate batch (A6 case 2) as far as there is room. From its first request on it is the running
        one, and matches of the old one return to the pool."""
        candidates = {item.request_id: item.positions for item in batch.candidate}
        batch_id, batch.batch_id = batch.batch_id, batch.candidate_id
        self._join(batch.candidate, view, batch, "starved" if batch.starved else "next batch")
        for item in batch.candidate:
            del candidates[item.request_id]
        if not candidates:
            batch.batch_id = batch_id
            return
        if not batch.switching:
            batch.switching = True
            batch.members = {}
            self._switches += 1
            self._give_back(batch.requests)
            batch.requests.clear()
        batch.members |= candidates  # requests that joined now
        if not batch.candidate:
            batch.starved = batch.switching = False

    def _join(self, waiting: deque[PooledRequest], view: InstanceView, batch: RunningBatch, reason: str) -> None:
        """Bind requests from the front while the worker has rows, blocks, and one block more for each of its rows;
        up to B_max only unless `fill_memory`."""
        capacity = view.capacity
        rows, free = batch.rows(view), batch.free_blocks(view)
        headroom = capacity.num_blocks if self._options.fill_memory else self._thresholds.max_blocks(capacity)
        if view.stats.waiting and rows:  # a request was preempted there: none overtakes it
            return
        while waiting and rows < capacity.max_rows:
            item = waiting[0]
            rest = free - item.blocks
            if rows and (rest < max(rows + 1, capacity.num_blocks // 20) or capacity.num_blocks - rest > headroom):
                return
            waiting.popleft()
            batch.bound(item)
            if item.holder == view.instance:  # nothing moves
                batch.has_arrived(item.request_id)
            self._fetched.pop(item.request_id, None)
            self._joined += 1
            rows, free = rows + 1, rest
            self._actions.append(Bind(item.request_id, view.instance, batch.batch_id, reason))

    def _fetch(self, buffered: Iterable[PooledRequest]) -> None:
        """A5, A9 · Prefetch buffered requests to their prefill worker's device, within the buffers' share of it."""
        used: dict[InstanceId, int] = {}
        for holder, blocks in self._fetched.values():
            used[holder] = used.get(holder, 0) + blocks
        wanted: list[RequestId] = []
        for item in buffered:
            view = self._views.get(item.holder)
            if view is None or item.request_id in self._fetched:
                continue
            total = used.get(item.holder, 0) + item.blocks
            if total <= _BUFFER_SHARE * view.capacity.num_blocks:
                used[item.holder] = total
                self._fetched[item.request_id] = (item.holder, item.blocks)
                wanted.append(item.request_id)
        if wanted:
            self._actions.append(Prefetch(tuple(wanted)))

    def metrics(self) -> dict[str, float]:
        buffered = sum(len(batch.requests) + len(batch.candidate) for batch in self._batches.values())
        return {
            "pool_requests": float(len(self._tree)),
            "pool_blocks": float(self._tree.blocks(QuadTree.ROOT)),
            "buffered_requests": float(buffered),
            "aligned_batches_total": float(self._made),
            "batch_switches_total": float(self._switches),
            "starved_batches_total": float(self._starved),
            "late_bound_total": float(self._joined),
            "evictions_total": float(self._evictions),
        }
