"""Where requests run: on one instance (colocated) or split at the prompt's end (P/D disaggregation, DistServe, B8).

Both choose by load. When a role has no living instance the other role stands in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from cohort.common.policies.interface import (
    ClusterView,
    Impossible,
    InstanceView,
    Placed,
    Placement,
    Wait,
    WaitingRequest,
)
from cohort.common.policies.link_price import transfer_seconds
from cohort.common.policies.serving_views import MinIndex, ServingViews
from cohort.common.types import InstanceId, Request, Role, Segment


def fits(view: InstanceView, request: Request) -> bool:
    """Return whether this instance alone could ever hold the whole request."""
    capacity = view.capacity
    return (
        request.prompt_tokens + request.sampling.max_tokens <= capacity.max_model_len
        and request.max_positions <= capacity.positions
    )


def impossible(views: Iterable[InstanceView], request: Request) -> Impossible:
    most = max((min(v.capacity.max_model_len, v.capacity.positions) for v in views), default=0)
    wanted = request.prompt_tokens + request.sampling.max_tokens
    return Impossible(f"needs {wanted} positions; the largest instance holds {most}")


Rank = Callable[[InstanceView], tuple[float, int, str]]
Load = Callable[[InstanceView], float]
_NEARLY = 0.1
"""Load that an adapter in place is worth: share of a cache, or of a full iteration's tokens in the queue."""


def _prefill_load(view: InstanceView) -> tuple[int, int, str]:
    return (view.queued_prefill_tokens, view.stats.running + view.assigned_requests, view.instance)


def _decode_load(view: InstanceView) -> tuple[float, int, str]:
    """Return the share of the cache in use or reserved, then rows. A worker without a report counts as full."""
    capacity, stats = view.capacity, view.stats
    blocks = capacity.num_blocks
    reserved = -(-view.assigned_context_tokens // capacity.block_size) * capacity.num_groups
    used = blocks - (stats.free_blocks + stats.cached_blocks) + reserved
    rows = stats.running + stats.awaiting_kv + view.assigned_requests
    return (used / (blocks or 1), rows, view.instance)


def _queued_share(view: InstanceView) -> float:
    return view.queued_prefill_tokens / max(1, view.capacity.max_step_tokens)


def _unified_load(view: InstanceView) -> tuple[float, int, str]:
    used, rows, name = _decode_load(view)
    # A queued prompt delays a newcomer as a busy cache does; one step's worth of tokens weighs like a full cache.
    return (used + _queued_share(view), rows, name)


def _near(views: Sequence[InstanceView], request: Request, rank: Rank, load: Load | None = None) -> InstanceView:
    """Return the view of least `rank`; of those with nearly its `load` (the rank's first number) one that holds the
    request's LoRA adapter, or can load it without letting another go."""
    best = min(views, key=rank)
    if best.holds(request.adapter):
        return best
    load = load or (lambda view: rank(view)[0])
    for better in (
        [view for view in views if view.holds(request.adapter)],
        [view for view in views if view.has_adapter_slot],
    ):
        if better and load(other := min(better, key=rank)) <= load(best) + _NEARLY:
            return other
    return best


def _preferred(views: Iterable[InstanceView], instance: InstanceId | None) -> InstanceView | None:
    return None if instance is None else next((view for view in views if view.instance == instance), None)


def _unified(cluster: ClusterView, request: Request) -> list[InstanceView] | Wait | Impossible:
    """Return workers that can hold the whole request: those of both roles, else any; or why none can."""
    views = list(cluster.instances.values())
    if not views:
        return Wait("no worker is registered")
    able = [view for view in views if fits(view, request)]
    if not able:
        return impossible(views, request)
    return [view for view in able if view.capacity.role is Role.UNIFIED] or able


class Colocated(Placement):
    """One segment on the least loaded instance."""

    moves_kv = False
    reads_queues = False

    def __init__(self) -> None:
        self._least = MinIndex(_unified_load, lambda view: view.capacity.role is Role.UNIFIED, or_all=True)

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: InstanceId | None
    ) -> Placed | Wait | Impossible:
        request = waiting.request
        chosen = self._best_by_index(cluster, request) if preferred is None else None
        if chosen is None:
            unified = _unified(cluster, request)
            if isinstance(unified, Wait | Impossible):
                return unified
            chosen = _preferred(unified, preferred) or _near(unified, request, _unified_load)
        return Placed((Segment(0, None, chosen.instance),), "colocated on the least loaded instance")

    def _best_by_index(self, cluster: ClusterView, request: Request) -> InstanceView | None:
        """Return the least loaded worker without a look at every one; None where that does not tell."""
        views = cluster.instances
        if request.adapter or not isinstance(views, ServingViews) or not self._least.all_hold(views, request):
            return None
        return self._least.of(views)


class ColocatedInTurn(Placement):
    """One segment, instances in turn whatever their load: DynaServe's colocated baseline (§2.4). Instances that could
    never hold the request are passed over; a preferred instance is chosen as elsewhere."""

    moves_kv = False
    reads_queues = False

    def __init__(self) -> None:
        self._last: InstanceId = ""

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: InstanceId | None
    ) -> Placed | Wait | Impossible:
        able = _unified(cluster, waiting.request)
        if isinstance(able, Wait | Impossible):
            return able
        unified = sorted(view.instance for view in able)
        if preferred in unified:
            return Placed((Segment(0, None, preferred),), "colocated as preferred")
        # By name, not by count: instances come and go, and the turn goes on behind the last one served.
        self._last = next((name for name in unified if name > self._last), unified[0])
        return Placed((Segment(0, None, self._last),), "colocated in turn")


_FULL_S = 1.0
"""Seconds of a prompt's KV on a link that weigh like a full cache at its end."""


class Disaggregated(Placement):
    """[0, P) on the prefill worker with the shortest queue, [P, ∞) on the decode worker with the most room (B8). A
    measured slow link makes a decode worker count as fuller."""

    reads_queues = False

    def __init__(self) -> None:
        self._colocated = Colocated()
        self._queued = MinIndex(_prefill_load, lambda view: view.capacity.role is not Role.DECODE)
        self._filled = MinIndex(_decode_load, lambda view: view.capacity.role is not Role.PREFILL)
        self._linked = MinIndex(lambda view: (not view.stats.link_rates, view.instance))
        """Workers by whether their links were measured, these first."""

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: InstanceId | None
    ) -> Placed | Wait | Impossible:
        request = waiting.request
        split = len(request.tokens)
        pair = self._best_by_index(cluster, request, split) if preferred is None else None
        if pair is not None:
            return self._placed(request, split, pair[0], lambda: pair[1])
        views = list(cluster.instances.values())
        prefills = [view for view in views if view.capacity.role is not Role.DECODE]
        decoding = [view for view in views if view.capacity.role is not Role.PREFILL]
        if not prefills or not decoding:
            placed = self._colocated.place(now_s, waiting, cluster, preferred)
            return Placed(placed.segments, "a role is missing: colocated") if isinstance(placed, Placed) else placed
        decodes = [view for view in decoding if fits(view, request)]
        able = [view for view in prefills if split <= view.capacity.positions]
        if not decodes or not able:
            return impossible(views, request)
        prefill = _preferred(able, preferred) or _near(able, request, _prefill_load, _queued_share)
        return self._placed(
            request, split, prefill, lambda: self._decode_worker(cluster, prefill, decodes, request, split)
        )

    def _best_by_index(
        self, cluster: ClusterView, request: Request, split: int
    ) -> tuple[InstanceView, InstanceView] | None:
        """Return both workers without a look at every one; None where that does not tell."""
        views = cluster.instances
        if request.adapter or not isinstance(views, ServingViews):
            return None
        linked, prefill, decode = (least.of(views) for least in (self._linked, self._queued, self._filled))
        if linked is None or linked.stats.link_rates or prefill is None or decode is None:
            return None
        if not self._queued.all_have(views, split) or not self._filled.all_hold(views, request):
            return None
        return prefill, decode

    def _placed(
        self, request: Request, split: int, prefill: InstanceView, decode_worker: Callable[[], InstanceView]
    ) -> Placed:
        if split - request.prompt_tokens + 1 >= request.sampling.max_tokens:
            return Placed((Segment(0, None, prefill.instance),), "its last token comes with the prefill")
        decode = decode_worker()
        if decode.instance == prefill.instance:
            return Placed((Segment(0, None, prefill.instance),), "one instance is best for both")
        return Placed(
            (Segment(0, split, prefill.instance), Segment(split, None, decode.instance)), "prefill and decode by load"
        )

    def _decode_worker(
        self, cluster: ClusterView, prefill: InstanceView, decodes: list[InstanceView], request: Request, split: int
    ) -> InstanceView:
        if not any(view.stats.link_rates for view in cluster.instances.values()):
            return _near(decodes, request, _decode_load)

        def load(view: InstanceView) -> tuple[float, int, str]:
            used, rows, name = _decode_load(view)
            receiver = view.instance
            moved_s = transfer_seconds(cluster.instances, prefill.instance, receiver, split, unmeasured_s=0.0)
            return used + moved_s / _FULL_S, rows, name

        return _near(decodes, request, load)
