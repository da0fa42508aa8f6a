"""Where AlignedServe's requests run: the prompt on a prefill worker, the response wherever its KV is bound later (A2).

A `Placement` of the manager. Decides only whether `AlignedBinding` chooses the decode worker.
"""

from __future__ import annotations

from cohort.common.policies.alignedserve.thresholds import Thresholds
from cohort.common.policies.baselines.placements import Disaggregated
from cohort.common.policies.interface import ClusterView, Impossible, Placed, Placement, Wait, WaitingRequest
from cohort.common.policies.settings import AlignedServeSettings
from cohort.common.types import InstanceId, Segment


class LateBound(Placement):
    """A2 · Placement of [0, P) by load, [P, ∞) late-bound; bound at once while waiting would gain nothing.

    Differs from the paper: a request that finds the pool empty and its decode worker with fewer rows than a batch
    needs is placed by `Disaggregated`, so at low load blocks are pushed while the prompt is computed.
    """

    def __init__(self, options: AlignedServeSettings) -> None:
        self._thresholds = Thresholds(options)
        self._by_load = Disaggregated()

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: InstanceId | None
    ) -> Placed | Wait | Impossible:
        placed = self._by_load.place(now_s, waiting, cluster, preferred)
        if not isinstance(placed, Placed) or len(placed.segments) == 1:
            return placed
        first, second = placed.segments
        decode = cluster.instances[second.instance] if second.instance is not None else None
        if decode is not None and not any(view.stats.parked for view in cluster.instances.values()):
            rows = decode.stats.running + decode.stats.awaiting_kv + decode.assigned_requests
            blocks = decode.capacity.geometry.blocks_for(len(waiting.request.tokens) + decode.assigned_context_tokens)
            spare = decode.free_blocks - blocks
            if rows < self._thresholds.min_requests(decode.capacity) and spare > decode.capacity.num_blocks // 2:
                return Placed(placed.segments, "few run: nothing to align with")
        return Placed((first, Segment(second.start, None, None)), "prefill by load, then late-bound")
