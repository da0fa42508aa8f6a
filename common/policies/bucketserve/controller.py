"""The dynamic batching controller: how large may the next batch be, recomputed from live memory at every batch.

    BatchController.open(now, cluster) ──▶ Round: one prefill worker after the other, each batch bounded by
        · the decode workers' KV memory     Σ S_i of prompt + predicted output (B3, B4)
        · the prefill worker's KV memory    Σ of prompts (its KV stays until it was handed over)
        · its device memory beside the KV   tokens of one forward × bytes each
        · how much work it already has      what is sent too early can no longer be reordered

Asked by `prefill_order.py`, which chooses the requests; never looks at the queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace

from cohort.common.policies.bucketserve.demand import DemandRule
from cohort.common.policies.bucketserve.live_memory import LiveMemory
from cohort.common.policies.bucketserve.safe_batch import expected_safe_batch, next_is_safe, safe_bytes
from cohort.common.policies.interface import ClusterView, InstanceView
from cohort.common.policies.settings import BucketServeSettings
from cohort.common.types import InstanceId, KvGeometry, RequestId

MEMORY_RESERVE = 0.1
"""Share of the remaining KV memory that no batch may reserve: the paper's 10 % (B3)."""
_STATS_MAX_AGE_S = 1.0
"""A worker whose last report is older gets no batch: five reports were lost, and its word on its memory no longer
holds."""


@dataclass(slots=True)
class _Target:
    """A worker that decodes, and the blocks it can safely take in this round; offline work leaves `floor` of them.
    `staging` blocks more may be reserved: those requests' prompts wait, computed, on the prefill workers."""

    view: InstanceView
    blocks: int
    floor: int
    staging: int
    idle: bool
    geometry: KvGeometry


@dataclass(slots=True)
class _Prefiller:
    """A worker that prefills: work it may still be sent, and the blocks its prompts may take."""

    view: InstanceView
    tokens: int
    blocks: int
    idle: bool
    forward_tokens: int
    geometry: KvGeometry


class Round:
    """The room of one call of `decide`. Mutable: every request that is taken leaves less."""

    def __init__(
        self, memory: LiveMemory, prefillers: list[_Prefiller], targets: list[_Target], *, now_s: float, padded: bool
    ) -> None:
        self._memory = memory
        self._prefillers = prefillers
        self._targets = {target.view.instance: target for target in targets}
        # The target with most room in O(log targets): (−blocks, instance), checked against the target when read.
        self._most_free = [(-target.blocks, target.view.instance) for target in targets]
        heapify(self._most_free)
        self._now_s = now_s
        self._padded = padded
        self._worker: _Prefiller | None = None
        self._unified: _Target | None = None
        """The present worker's own target, where it decodes itself."""
        self._rows = 0
        self._longest = 0
        self._tokens = 0

    def next_batch(self) -> InstanceId | None:
        """Begin a batch on the prefill worker with the least work; None when all have enough."""
        if self._padded and self._rows:
            self.skip_worker()  # one batch at a time
        self._worker = max(self._prefillers, key=lambda p: p.tokens, default=None)
        if self._worker is None or self._worker.tokens <= 0:
            return None
        self._rows = self._longest = self._tokens = 0
        instance = self._worker.view.instance
        self._unified = self._targets.get(instance)
        return instance

    def skip_worker(self) -> None:
        """The present worker cannot take the next request: go on without it in this round."""
        self._prefillers = [prefiller for prefiller in self._prefillers if prefiller is not self._worker]
        self._worker = None

    def take(self, request_id: RequestId, prompt_tokens: int, total_length: int, *, online: bool) -> bool:
        """Whether the request still fits the batch; if so it is in, and its memory reserved.

        Eq. 6 (`next_is_safe`). The first of a batch may exceed the forward, the work ahead and, on a worker
        with nothing else, the 10 % reserve: or a request that needs nearly a whole cache would wait for ever.
        """
        worker = self._worker
        if worker is None:
            return False
        first = self._rows == 0
        longest = max(self._longest, prompt_tokens)
        tokens = (self._rows + 1) * longest if self._padded else self._tokens + prompt_tokens
        if not first and (tokens > worker.forward_tokens or prompt_tokens > worker.tokens):
            return False
        unified = self._unified
        target = unified or self._most_headroom()
        blocks = target.geometry.blocks_for(total_length)
        prompt_blocks = worker.geometry.blocks_for(prompt_tokens)
        kept = (0 if online else target.floor) - target.staging
        if not next_is_safe(target.blocks, blocks, kept) and not target.idle:
            return False
        if unified is None and worker.blocks < prompt_blocks and not worker.idle:
            return False
        target.blocks -= blocks
        target.idle = False
        self._memory.reserve(self._now_s, target.view.instance, request_id, blocks)
        if unified is None:
            worker.blocks -= prompt_blocks
            worker.idle = False
            self._memory.reserve(self._now_s, worker.view.instance, request_id, prompt_blocks)
        worker.tokens -= prompt_tokens
        self._rows, self._longest, self._tokens = self._rows + 1, longest, self._tokens + prompt_tokens
        return True

    def _most_headroom(self) -> _Target:
        """Where placement will most likely put the output."""
        while True:
            negative, instance = self._most_free[0]
            target = self._targets[instance]
            if target.blocks == -negative:
                return target
            heapreplace(self._most_free, (-target.blocks, instance))


class BatchController:
    def __init__(
        self,
        options: BucketServeSettings,
        *,
        dispatch_ahead_tokens: int,
        demand: DemandRule,
        padded: bool,
        staging_share: float = 1.0,
    ) -> None:
        """`padded`: a batch costs N · S_max tokens, not Σ S. `staging_share`: of the prefill workers' caches, for
        computed prompts that wait for a decode worker (B7)."""
        self.max_batch = options.max_batch
        self._ahead = dispatch_ahead_tokens
        self._activation_bytes = options.activation_bytes
        self._padded = padded
        self._staging = staging_share
        self.demand = demand
        self._memory = LiveMemory()
        self.safe_memory_bytes = 0
        """M_safe over all decode workers at the last round, for metrics."""

    def withdraw(self, request_id: RequestId) -> None:
        self._memory.withdraw(request_id)

    def open(self, now_s: float, cluster: ClusterView) -> Round:
        """B7 · BucketServe §III-IV: the room for batches now, from the newest stats of every worker.

        Differs from the paper: M_remain is what the paged cache can still hand out after the predicted growth of what
        runs (the cache itself was allocated once, so the device cannot run out of it), and the device's own free
        memory bounds the tokens of one forward. Workers whose report is older than `_STATS_MAX_AGE_S` get nothing.
        """
        self._memory.update(now_s, cluster)
        fresh = [v for v in cluster.instances.values() if v.report_age_s <= _STATS_MAX_AGE_S]
        # A role without a living worker is taken over by the other one, as placement does.
        prefilling = [v for v in fresh if v.role.prefills] or fresh
        decoding = [v for v in fresh if v.role.decodes] or fresh
        held_back = self.demand.kept_free(cluster)
        apart = [view for view in prefilling if not view.role.decodes]
        stage = sum(view.capacity.positions for view in apart) * self._staging
        targets = []
        for view in decoding:
            blocks, geometry = self._safe_blocks(view), view.capacity.geometry
            staged = int(stage / len(decoding)) // geometry.block_size * geometry.num_groups
            staging = 0 if view in prefilling else staged
            held = int(held_back * max(0, blocks))
            targets.append(_Target(view, blocks, held, staging, self._memory.idle(view), geometry))
        self.safe_memory_bytes = sum(max(0, t.blocks) * t.geometry.block_bytes for t in targets)
        prefillers = [
            _Prefiller(
                v,
                self._headroom(v),
                self._safe_blocks(v),
                self._memory.idle(v),
                self._forward_tokens(v),
                v.capacity.geometry,
            )
            for v in (prefilling if targets else [])
        ]
        return Round(self._memory, prefillers, targets, now_s=now_s, padded=self._padded)

    def has_headroom(self, cluster: ClusterView) -> bool:
        """Quick no: every prefill worker has work enough."""
        prefilling = False
        for view in cluster.instances.values():
            if view.capacity.role.prefills:
                if self._headroom(view) > 0:
                    return True
                prefilling = True
        return not prefilling and bool(cluster.instances)  # others take over

    def expected_batch(self, cluster: ClusterView, mean_total_length: float) -> int:
        """B4 · N_max of Alg. 1: Eq. 6 at the mean total length of what waits, never past the configured bound."""
        views = cluster.instances.values()
        view = next((v for v in views if v.role.decodes), next(iter(views), None))
        if view is None:
            return self.max_batch
        expected = expected_safe_batch(mean_total_length, self.safe_memory_bytes, view.capacity.geometry)
        return min(self.max_batch, expected)

    def rectangle_tokens(self, cluster: ClusterView) -> int:
        """Tokens of one padded batch, rows times the longest; 0 on the path without padding."""
        if not self._padded:
            return 0
        views = cluster.instances.values()
        return max(map(self._forward_tokens, [v for v in views if v.role.prefills] or views), default=0)

    def _safe_blocks(self, view: InstanceView) -> int:
        """M_safe of Eq. 5 in whole blocks; an excess of promises stays negative."""
        remaining = self._memory.remaining_blocks(view)
        return safe_bytes(remaining, MEMORY_RESERVE) if remaining > 0 else remaining

    def _headroom(self, view: InstanceView) -> int:
        """Prompt tokens the worker may still be sent.

        B8 · on a padded path it is sent one whole batch when it has less than half a forward left: a request sent
        as soon as it fits goes alone, and a batch of one shares its forward with no other.
        """
        if not self._padded:
            return self._ahead - view.queued_prefill_tokens
        forward = self._forward_tokens(view)
        waits = view.assigned_prefill_tokens or view.stats.queued_prefill_tokens > forward // 2
        return 0 if waits else forward

    def _forward_tokens(self, view: InstanceView) -> int:
        """Tokens of one prefill batch: one iteration, and no more than the device's free memory holds."""
        tokens = view.capacity.max_step_tokens
        if self._activation_bytes and view.stats.memory_free_bytes:
            free = safe_bytes(view.stats.memory_free_bytes, MEMORY_RESERVE)
            tokens = min(tokens, free // self._activation_bytes)
        return tokens
