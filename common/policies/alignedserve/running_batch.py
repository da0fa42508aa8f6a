"""A5, A6, A7 · The requests that one decode worker runs and is going to run, as the manager knows them.

    pool (quad-tree) ──A4──▶ candidate batch ──switch──┐
          └──────────A7──▶ candidate requests ─────────┴─▶ running batch ─▶ finished, or evicted to the pool

Owned by `AlignedBinding`, one per decode worker. Counts what the worker's last report does not contain: requests
bound, arrived or gone since.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from cohort.common.policies.alignedserve.quad_tree import PooledRequest
from cohort.common.policies.interface import InstanceView
from cohort.common.types import KvGeometry, RequestId, WorkerStats


@dataclass(slots=True)
class RunningBatch:
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
    left_blocks: int = 0
    """Blocks of requests that left since the last report."""
    left_rows: int = 0
    _contexts: dict[RequestId, int] = field(default_factory=dict)
    _stats: WorkerStats | None = None

    def look(self, view: InstanceView) -> None:
        """Take over a new report, once."""
        if self._stats is view.stats:
            return
        self._stats = view.stats
        self.arrived.clear()
        self.left_blocks = self.left_rows = 0
        self._contexts = {work.request_id: work.context for work in view.stats.queue}
        for request_id, positions in self.members.items():
            self.members[request_id] = max(positions, self._contexts.get(request_id, 0))

    def bound(self, item: PooledRequest) -> None:
        self.moving[item.request_id] = item.blocks

    def has_arrived(self, request_id: RequestId) -> None:
        blocks = self.moving.pop(request_id, None)
        if blocks is not None:
            self.arrived[request_id] = blocks

    def has_left(self, request_id: RequestId, geometry: KvGeometry) -> None:
        """Drop a request that ended, was lost or was evicted."""
        self.members.pop(request_id, None)
        if self.moving.pop(request_id, None) is None and self.arrived.pop(request_id, None) is None:
            positions = self._contexts.pop(request_id, 0)
            if positions:
                self.left_blocks += geometry.blocks_held(positions)
                self.left_rows += 1

    def rows(self, view: InstanceView) -> int:
        """Return the number of requests that run there or will shortly."""
        reported = view.stats.running + view.stats.waiting - self.left_rows
        return max(0, reported) + len(self.moving) + len(self.arrived)

    def stuck(self, view: InstanceView) -> bool:
        """Return whether no request runs and a waiting one, there or on the way, does not get its blocks."""
        if view.stats.running or self.arrived:
            return False
        first = next(iter(self.moving.values()), None)  # grants are given in order
        return view.stats.waiting > 0 if first is None else first > view.free_blocks

    def free_blocks(self, view: InstanceView) -> int:
        reserved = sum(self.moving.values()) + sum(self.arrived.values())
        return min(view.free_blocks + self.left_blocks, view.capacity.num_blocks) - reserved

    def span(self, slack: float) -> tuple[int, int] | None:
        """A7 · Return the range of prefix lengths that match the running batch, `slack` of it beyond either end; None
        if no request runs. A tenth at either end does not count: one long prefix among short ones would make every
        request match."""
        if not self.members:
            return None
        lengths = sorted(self.members.values())
        edge = len(lengths) // 10
        return max(1, int(lengths[edge] * (1.0 - slack))), int(lengths[-1 - edge] * (1.0 + slack))
