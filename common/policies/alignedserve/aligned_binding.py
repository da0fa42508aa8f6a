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

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain

from cohort.common.policies.alignedserve.batch_numbers import FIRST_BATCH
from cohort.common.policies.alignedserve.density_first_search import density_first_search, starved_batch
from cohort.common.policies.alignedserve.patience import patience_s
from cohort.common.policies.alignedserve.quad_tree import PooledRequest, QuadTree
from cohort.common.policies.alignedserve.running_batch import RunningBatch
from cohort.common.policies.alignedserve.thresholds import Thresholds
from cohort.common.policies.interface import Bind, ClusterView, InstanceView, LateBinding, ParkedKv, Prefetch
from cohort.common.policies.settings import AlignedServeSettings
from cohort.common.types import InstanceId, KvGeometry, RequestId, Role

_LONGEST_PREFIX = 65_536
"""Tokens that the quad-tree covers; longer prefixes count as this long. Five levels over a leaf of 64."""
_SLACK = 0.25
"""Share beyond the running batch's shortest and longest prefix that still matches it: with more, short rows wait for
long ones again; with less, few requests match."""
_BUFFER_SHARE = 0.4
"""Share of a prefill worker's blocks for candidate batch and candidate requests: as much as a batch (B_max)."""
_STARVATION_SHARE = 0.5
"""Share of the time that a request's TPOT target gives all of its output; the rest is for decoding."""


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
            batch.has_left(request_id, self._geometry)

    def decide(self, now_s: float, cluster: ClusterView) -> list[Bind | Prefetch]:
        views = cluster.instances
        decodes = [v for v in views.values() if v.role.decodes] or list(views.values())
        for instance in [name for name in self._batches if all(v.instance != name for v in decodes)]:
            lost = self._batches.pop(instance)
            self._give_back([*lost.requests, *lost.candidate])
        if not decodes:
            return []
        self._geometry = decodes[0].capacity.geometry
        actions: list[Bind | Prefetch] = []
        for item in self._fresh:
            self._take_in(now_s, item, views, actions)
        self._fresh.clear()
        if not self._tree and not any(b.requests or b.candidate for b in self._batches.values()):
            return actions
        # The batch with most headroom chooses first.
        for view in sorted(decodes, key=lambda v: (-v.free_blocks, v.instance)):
            batch = self._batches.setdefault(view.instance, RunningBatch())
            batch.look(view)
            self._advance(now_s, view, batch, views, actions)
        return actions

    # -- the pool ----------------------------------------------------------------------------------------------

    def _take_in(
        self, now_s: float, item: ParkedKv, views: Mapping[InstanceId, InstanceView], actions: list[Bind | Prefetch]
    ) -> None:
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
        batch, view = self._batches.get(item.instance), views.get(item.instance)
        if batch is not None and (decode == item.instance or (view is not None and view.role is Role.DECODE)):
            # A decode worker has evicted it: to the buffer of the prefill worker with most room.
            batch.has_left(request_id, self._geometry)
            prefills = [v for v in views.values() if v.role.prefills and v.instance != item.instance]
            target = max(prefills, key=lambda v: (v.free_blocks, v.instance), default=None)
            # Half of that cache stays free for prompts: full caches wait for each other's blocks.
            if target is not None and target.free_blocks - blocks >= target.capacity.num_blocks // 2:
                self._evictions += 1
                self._evicted[request_id] = item.instance
                actions.append(Bind(request_id, target.instance, 0, "evicted: the longest makes room", parks=True))
                return
        home = self._batches.get(self._evicted.pop(request_id, ""))
        span = home.span(_SLACK) if home is not None else None
        if home is not None and span is not None and span[0] <= item.positions <= span[1]:
            home.requests.append(pooled)
            self._decode_of[request_id] = next(name for name, each in self._batches.items() if each is home)
        else:
            self._tree.insert(pooled)

    def _give_back(self, items: Iterable[PooledRequest]) -> None:
        for item in items:
            del self._decode_of[item.request_id]
            self._tree.insert(item)

    # -- one decode worker -------------------------------------------------------------------------------------

    def _advance(
        self,
        now_s: float,
        view: InstanceView,
        batch: RunningBatch,
        views: Mapping[InstanceId, InstanceView],
        actions: list[Bind | Prefetch],
    ) -> None:
        if batch.stuck(view):
            self._unblock(view, batch, actions)
        due = self._tree.due_s(QuadTree.ROOT) <= now_s
        if batch.candidate and batch.due_s <= now_s:
            batch.starved = True
        if due and not batch.starved and not batch.switching:
            self._give_back(batch.candidate)
            batch.candidate.clear()
            self._choose(now_s, view, batch)
        if not batch.starved and not batch.switching:
            self._match(view, batch)
            self._join(batch.requests, view, batch, actions, "matches the running batch")
        if not batch.candidate:
            batch.starved = batch.switching = False
            # A batch below B_max may take any requests, however few; else they wait until they are enough for a batch.
            small = view.capacity.num_blocks - batch.free_blocks(view) < self._thresholds.max_blocks(view.capacity)
            if small or len(self._tree) >= self._thresholds.min_requests(view.capacity):
                self._choose(now_s, view, batch)
        if batch.candidate and (batch.starved or batch.switching or not batch.requests):
            self._switch(view, batch, actions)
        if self._options.prefetch:
            self._fetch(batch.requests, views, actions)
            self._fetch(batch.candidate, views, actions)

    def _unblock(self, view: InstanceView, batch: RunningBatch, actions: list[Bind | Prefetch]) -> None:
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
                actions.append(Bind(item.request_id, view.instance, batch.batch_id, "its worker has nothing to run"))
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
        if not chosen:
            chosen = self._take_over(view, batch)
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

    def _switch(self, view: InstanceView, batch: RunningBatch, actions: list[Bind | Prefetch]) -> None:
        """Start the candidate batch (A6 case 2) as far as there is room. From its first request on it is the running
        one, and matches of the old one return to the pool."""
        candidates = {item.request_id: item.positions for item in batch.candidate}
        batch_id, batch.batch_id = batch.batch_id, batch.candidate_id
        self._join(batch.candidate, view, batch, actions, "starved" if batch.starved else "next batch")
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

    def _join(
        self,
        waiting: deque[PooledRequest],
        view: InstanceView,
        batch: RunningBatch,
        actions: list[Bind | Prefetch],
        reason: str,
    ) -> None:
        """Bind requests from the front while the worker has rows, blocks, and one block more for each of its rows;
        up to B_max only unless `fill_memory`."""
        capacity = view.capacity
        rows, free = batch.rows(view), batch.free_blocks(view)
        headroom = capacity.num_blocks if self._options.fill_memory else self._thresholds.max_blocks(capacity)
        if view.stats.waiting and rows:  # a request was preempted there: none overtakes it
            return
        while waiting and rows < capacity.max_rows:
            item = waiting[0]
            left = free - item.blocks
            if rows and (left < max(rows + 1, capacity.num_blocks // 20) or capacity.num_blocks - left > headroom):
                return
            waiting.popleft()
            batch.bound(item)
            if item.holder == view.instance:  # nothing moves
                batch.has_arrived(item.request_id)
            self._fetched.pop(item.request_id, None)
            self._joined += 1
            rows, free = rows + 1, left
            actions.append(Bind(item.request_id, view.instance, batch.batch_id, reason))

    def _fetch(
        self,
        buffered: Iterable[PooledRequest],
        views: Mapping[InstanceId, InstanceView],
        actions: list[Bind | Prefetch],
    ) -> None:
        """A5, A9 · Prefetch buffered requests to their prefill worker's device, within the buffers' share of it."""
        used: dict[InstanceId, int] = {}
        for holder, blocks in self._fetched.values():
            used[holder] = used.get(holder, 0) + blocks
        wanted: list[RequestId] = []
        for item in buffered:
            view = views.get(item.holder)
            if view is None or item.request_id in self._fetched:
                continue
            total = used.get(item.holder, 0) + item.blocks
            if total <= _BUFFER_SHARE * view.capacity.num_blocks:
                used[item.holder] = total
                self._fetched[item.request_id] = (item.holder, item.blocks)
                wanted.append(item.request_id)
        if wanted:
            actions.append(Prefetch(tuple(wanted)))

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
