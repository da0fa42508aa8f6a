"""The dynamic batching controller: how large the next batch may be, recomputed from live memory at every batch.

    BatchController.open(now, cluster) ──▶ Round: one prefill worker after the other, each batch bounded by
        · the decode workers' KV memory     Σ S_i of prompt + predicted output (B3, B4)
        · the prefill worker's KV memory    Σ of prompts (its KV stays until it was handed over)
        · its device memory beside the KV   tokens of one forward × bytes each
        · how much work it already has      what is sent too early can no longer be reordered

Called by `prefill_order.py`, which chooses the requests; never reads the queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace

from cohort.common.policies.bucketserve.demand import DemandRule
from cohort.common.policies.bucketserve.live_memory import LiveMemory
from cohort.common.policies.bucketserve.safe_batch import expected_safe_batch, next_is_safe, safe_bytes
from cohort.common.policies.interface import ClusterView, InstanceView
from cohort.common.policies.settings import BucketServeSettings
from cohort.common.types import InstanceId, RequestId

MEMORY_RESERVE = 0.1
"""Share of the remaining KV memory that no batch may reserve: the paper's 10 % (B3)."""
_STATS_MAX_AGE_S = 1.0
"""A worker whose last report is older gets no batch: five reports were lost."""


@dataclass(slots=True)
class _Target:
    """A worker that decodes, and the blocks it can safely take in this round. Offline work leaves `floor` of them;
    `staging` more may be reserved, by requests whose computed prompts wait on the prefill workers."""

    view: InstanceView
    blocks: int
    floor: int
    staging: int
    idle: bool


@dataclass(slots=True)
class _Prefiller:
    """A worker that prefills: work it may still be sent, and the blocks its prompts may take."""

    view: InstanceView
    tokens: int
    blocks: int
    idle: bool
    forward_tokens: int


class Round:
    """Memory and work left in one call of `decide`; every request that is taken reduces it."""

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
        """Target of the current worker itself, if it decodes."""
        self._rows = self._longest = self._tokens = 0

    def next_batch(self) -> InstanceId | None:
        """Start a batch on the prefill worker with the least work; None when all have enough."""
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
        """Continue this round without the current worker: it cannot take the next request."""
        self._prefillers = [prefiller for prefiller in self._prefillers if prefiller is not self._worker]
        self._worker = None

    def take(self, request_id: RequestId, prompt_tokens: int, total_length: int, *, online: bool) -> bool:
        """Take the request into the batch and reserve its memory if it fits (Eq. 6, `next_is_safe`); return whether.

        The first of a batch may exceed the forward, the work ahead and, on an idle worker, the 10 % reserve: otherwise
        a request that needs nearly a whole cache would wait for ever.
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
        blocks = target.view.capacity.geometry.blocks_for(total_length)
        prompt_blocks = worker.view.capacity.geometry.blocks_for(prompt_tokens)
        reserved = (0 if online else target.floor) - target.staging
        if not next_is_safe(target.blocks, blocks, reserved) and not target.idle:
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
        """Return the target on which placement will most likely put the output."""
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
        """`padded`: a batch costs N · S_max tokens, not Σ S. `staging_share`: share of the prefill workers' caches for
        computed prompts that wait for a decode worker (B7)."""
        self.max_batch = options.max_batch
        self._ahead = dispatch_ahead_tokens
        self._activation_bytes = options.activation_bytes
        self._padded = padded
        self._staging = staging_share
        self.demand = demand
        self._memory = LiveMemory()
        self.safe_memory_bytes = 0
        """M_safe over all decode workers in the last round, for metrics."""

    def withdraw(self, request_id: RequestId) -> None:
        self._memory.withdraw(request_id)

    def open(self, now_s: float, cluster: ClusterView) -> Round:
        """B7 · BucketServe §III-IV: Return a round of batches, from the newest stats of every worker.

        Differs from the paper: M_remain is what the paged cache can still hand out after the predicted growth of what
        runs; the device's own free memory bounds the tokens of one forward.
        """
        self._memory.update(now_s, cluster)
        fresh = [v for v in cluster.instances.values() if v.report_age_s <= _STATS_MAX_AGE_S]
        # A role without a living worker is taken over by the other one, as placement does.
        prefilling = [v for v in fresh if v.role.prefills] or fresh
        decoding = [v for v in fresh if v.role.decodes] or fresh
        held_back = self.demand.reserved_share(cluster)
        apart = [view for view in prefilling if not view.role.decodes]
        stage = sum(view.capacity.positions for view in apart) * self._staging
        targets = []
        for view in decoding:
            blocks, geometry = self._safe_blocks(view), view.capacity.geometry
            staged = int(stage / len(decoding)) // geometry.block_size * geometry.num_groups
            staging = 0 if view in prefilling else staged
            held = int(held_back * max(0, blocks))
            targets.append(_Target(view, blocks, held, staging, self._memory.idle(view)))
        self.safe_memory_bytes = sum(max(0, t.blocks) * t.view.capacity.geometry.block_bytes for t in targets)
        prefillers = [
            _Prefiller(v, self._headroom(v), self._safe_blocks(v), self._memory.idle(v), self._forward_tokens(v))
            for v in (prefilling if targets else [])
        ]
        return Round(self._memory, prefillers, targets, now_s=now_s, padded=self._padded)

    def has_headroom(self, cluster: ClusterView) -> bool:
        """Return whether any prefill worker may be sent work; without one the other workers take over."""
        prefilling = [view for view in cluster.instances.values() if view.capacity.role.prefills]
        return any(self._headroom(v) > 0 for v in prefilling) if prefilling else bool(cluster.instances)

    def expected_batch(self, cluster: ClusterView, mean_total_length: float) -> int:
        """B4 · Return N_max of Alg. 1: Eq. 6 at the mean total length of what waits, at most the configured bound."""
        views = cluster.instances.values()
        view = next((v for v in views if v.role.decodes), next(iter(views), None))
        if view is None:
            return self.max_batch
        expected = expected_safe_batch(mean_total_length, self.safe_memory_bytes, view.capacity.geometry)
        return min(self.max_batch, expected)

    def rectangle_tokens(self, cluster: ClusterView) -> int:
        """Return the tokens of one padded batch, rows times the longest; 0 on the path without padding."""
        if not self._padded:
            return 0
        views = cluster.instances.values()
        return max(map(self._forward_tokens, [v for v in views if v.role.prefills] or views), default=0)

    def _safe_blocks(self, view: InstanceView) -> int:
        """Return M_safe of Eq. 5 in whole blocks; negative if more is promised than there is."""
        remaining = self._memory.remaining_blocks(view)
        return safe_bytes(remaining, MEMORY_RESERVE) if remaining > 0 else remaining

    def _headroom(self, view: InstanceView) -> int:
        """B8 · Return the prompt tokens that the worker may still be sent.

        With padding it is sent one whole batch when it has less than half a forward left: a request sent as soon as it
        fits would have a forward to itself.
        """
        if not self._padded:
            return self._ahead - view.queued_prefill_tokens
        forward = self._forward_tokens(view)
        waits = view.assigned_prefill_tokens or view.stats.queued_prefill_tokens > forward // 2
        return 0 if waits else forward

    def _forward_tokens(self, view: InstanceView) -> int:
        """Return the tokens of one prefill batch: one iteration, at most what the device's free memory holds."""
        tokens = view.capacity.max_step_tokens
        if self._activation_bytes and view.stats.memory_free_bytes:
            free = safe_bytes(view.stats.memory_free_bytes, MEMORY_RESERVE)
            tokens = min(tokens, free // self._activation_bytes)
        return tokens
