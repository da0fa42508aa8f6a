"""Placement of whole requests by what a router knows: its own record of who got which prompt, and the workers' load.

Differs from all three: their trees of prefixes are bounded by characters or fed by the workers' events, and forget at
intervals; the record here forgets what each worker's cache has no room for any more (`PrefixRecord`). Their loads are
counted by the router or scraped; here they are the last report and what was sent since.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from cohort.common.policies.baselines.placements import fits, impossible
from cohort.common.policies.cohort.prefix_record import Cached, Chain, PrefixRecord
from cohort.common.policies.interface import (
    ClusterView,
    Impossible,
    InstanceView,
    Placed,
    Placement,
    Wait,
    WaitingRequest,
)
from cohort.common.types import InstanceId, Request, Role, Segment

_CACHE_THRESHOLD, _BALANCE_FACTOR, _PREFIX_WEIGHT = 0.3, 1.5, 3.0
"""Documented defaults of values that no comparison changes."""


class Router(Placement):
    """One segment on the worker that `choose` names."""

    moves_kv = False
    reads_queues = False

    def __init__(self) -> None:
        self._record = PrefixRecord()

    @abstractmethod
    def choose(self, views: Sequence[InstanceView], request: Request, cached: Cached) -> InstanceView:
        """Choose one of these, by name ascending, which all can hold the request. `cached`: tokens of its prompt there,
        as believed."""

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: InstanceId | None
    ) -> Placed | Wait | Impossible:
        request, views = waiting.request, cluster.instances
        if not views:
            return Wait("no worker is registered")
        able = [view for view in views.values() if fits(view, request)]
        if not able:
            return impossible(views.values(), request)
        able = [view for view in able if view.capacity.role is Role.UNIFIED] or able
        able.sort(key=lambda view: (not view.holds(request.adapter), view.instance))
        if able[0].holds(request.adapter):
            able = [view for view in able if view.holds(request.adapter)]
        self._record.only(views)
        chain = Chain(request)
        cached = self._record.cached(chain)
        chosen = next((view for view in able if view.instance == preferred), None)
        chosen = chosen or self.choose(able, request, cached)
        new = len(request.tokens) - cached.get(chosen.instance, 0)
        self._record.placed(chain, chosen, float(new))
        return Placed((Segment(0, None, chosen.instance),), "routed")


def _requests(view: InstanceView) -> int:
    """Return the requests in flight there."""
    stats = view.stats
    return stats.running + stats.waiting + stats.awaiting_kv + view.assigned_requests


def _used_blocks(view: InstanceView) -> int:
    """Return the blocks in use there, with those of the prompts sent since its report."""
    capacity = view.capacity
    sent = -(-view.assigned_context_tokens // capacity.block_size) * capacity.num_groups
    return capacity.num_blocks - view.free_blocks + sent


class ByMatch(Router):
    """SGLang's `cache_aware` policy. While the workers' loads are alike: the longest match, if it is more than
    0.3 of the prompt (`--cache-threshold`), else the worker with fewest requests. Loads are unlike where most and
    fewest requests differ by more than `balance_abs` (`--balance-abs-threshold`, 64) and by the factor 1.5
    (`--balance-rel-threshold`); then the fewest requests decide whatever matches."""

    def __init__(self, balance_abs: int) -> None:
        super().__init__()
        self._abs = balance_abs

    def choose(self, views: Sequence[InstanceView], request: Request, cached: Cached) -> InstanceView:
        loads = [_requests(view) for view in views]
        most, fewest = max(loads), min(loads)
        if not (most - fewest > self._abs and most > _BALANCE_FACTOR * fewest):
            best = max(views, key=lambda view: cached.get(view.instance, 0))
            if cached.get(best.instance, 0) > _CACHE_THRESHOLD * len(request.tokens):
                return best
        return min(views, key=_requests)


class ByCost(Router):
    """Dynamo's KV router: least `overlap_weight` · prompt blocks to compute, its own included, + blocks in use with its
    own (`--kv-overlap-score-weight`, 1.0). Its temperature is 0 by default, and 0 here."""

    def __init__(self, overlap_weight: float) -> None:
        super().__init__()
        self._weight = overlap_weight

    def choose(self, views: Sequence[InstanceView], request: Request, cached: Cached) -> InstanceView:
        costs = [self._cost(view, len(request.tokens), cached.get(view.instance, 0)) for view in views]
        return views[costs.index(min(costs))]

    def _cost(self, view: InstanceView, tokens: int, cached: int) -> float:
        size = view.capacity.block_size
        computed = (view.queued_prefill_tokens + tokens - cached) / size
        return self._weight * computed + _used_blocks(view) + tokens / size


class ByScores(Router):
    """llm-d's endpoint picker: the highest sum of weighted scores from 0 to 1. `prefix-cache-scorer` (weight 3): the
    share of the prompt that matches; `queue-scorer` (2): 1 for the shortest queue, 0 for the longest;
    `kv-cache-utilization-scorer` (2): the share of blocks that are free. `max-score-picker`: the highest."""

    def __init__(self, queue_weight: float, kv_weight: float) -> None:
        super().__init__()
        self._queue_weight, self._kv_weight = queue_weight, kv_weight

    def choose(self, views: Sequence[InstanceView], request: Request, cached: Cached) -> InstanceView:
        queues = [view.stats.waiting + view.assigned_requests for view in views]
        longest, spread = max(queues), max(queues) - min(queues)

        def score(view: InstanceView, waiting: int) -> float:
            matched = cached.get(view.instance, 0) / len(request.tokens)
            short = (longest - waiting) / spread if spread else 1.0
            free = 1.0 - _used_blocks(view) / view.capacity.num_blocks
            return _PREFIX_WEIGHT * matched + self._queue_weight * short + self._kv_weight * free

        scores = [score(view, waiting) for view, waiting in zip(views, queues, strict=True)]
        return views[scores.index(max(scores))]
