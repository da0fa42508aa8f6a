"""The bucketing manager's policy: waiting requests in adaptive buckets, dispatched as memory-safe batches.

    add ──▶ length → cell → bucket (Alg. 1) ──▶ decide: adjust buckets
                                                        leader = the request due first (priority, class, age)
                                                        its bucket gives the batch, as large as memory is safe for

The `PrefillOrder` of the preset. The most urgent of all waiting requests leads every batch, so nothing starves whatever
order fills the rest of the batch. Cost per request: O(log cells + log buckets).
"""

from __future__ import annotations

from dataclasses import dataclass

from cohort.common.policies.bucketserve.bucket_set import Bucket, BucketSet
from cohort.common.policies.bucketserve.controller import BatchController, Round
from cohort.common.policies.bucketserve.length_index import SERIAL, Entry, LengthIndex, due_s, entry_of
from cohort.common.policies.bucketserve.waste import LengthHistogram, expected_waste, waste_ratio
from cohort.common.policies.interface import ClusterView, Dispatch, PrefillOrder, WaitingRequest
from cohort.common.policies.settings import BucketServeSettings
from cohort.common.types import InstanceId, Prediction, QueueBucket, RequestId

LONGEST_PROMPT = 131_072
"""Tokens of the buckets' range before the first worker has named its own limit."""
_FOREVER_S = 1e9
"""Greatest delay, thirty years: an infinite one has no whole nanosecond."""
_RECENT = 0.98
"""Weight of the past in the moving average of the waste ratio: about the last 50 batches."""


@dataclass(slots=True)
class _Item:
    waiting: WaitingRequest
    name: RequestId
    online: bool
    prompt_tokens: int
    total_length: int
    positions: int
    """Positions that it may ever hold; copied, because a long-waiting request has left the processor's caches."""
    cell: int
    entry: Entry


class BucketedPrefill(PrefillOrder):
    """B5, B6 · BucketServe §III-IV: requests by prompt length in buckets, one batch from one bucket."""

    def __init__(
        self, options: BucketServeSettings, controller: BatchController, *, length_limit: int = LONGEST_PROMPT
    ) -> None:
        """`length_limit`: L_max until a worker names its own."""
        self._options = options
        self._controller = controller
        self._priority_step_s = min(options.priority_step_s, _FOREVER_S)
        self._offline_delay_s = min(options.offline_delay_s, _FOREVER_S)
        self._items: dict[RequestId, _Item] = {}
        self._serials: dict[int, _Item] = {}
        self._next_serial = 0
        self._next_batch = 1
        self._prompt_tokens = self._total_length = 0
        self._default_output = controller.demand.default_output
        self._waste = 0.0
        self._batches = self._batched = self._real_tokens = self._padding_tokens = 0
        self._limit_known = False
        self._lay_out(length_limit)

    # -- the queue ---------------------------------------------------------------------------------------------

    def add(self, now_s: float, waiting: WaitingRequest) -> None:
        request = waiting.request
        name = request.request_id
        self._forget(name)
        self._controller.withdraw(name)  # it returns when it could not be placed
        tokens = len(request.tokens)
        self._next_serial += 1
        due = due_s(request, priority_step_s=self._priority_step_s, offline_delay_s=self._offline_delay_s)
        entry = entry_of(due, self._next_serial)
        item = _Item(
            waiting, name, request.online, tokens, self._total_length_of(waiting), request.max_positions, 0, entry
        )
        self._items[name] = item
        self._serials[self._next_serial] = item
        self._prompt_tokens += tokens
        self._total_length += item.total_length
        self._histogram.add(tokens)
        self._insert(item)

    def remove(self, now_s: float, request_id: RequestId) -> None:
        self._forget(request_id)

    def revise(self, now_s: float, request_id: RequestId, prediction: Prediction) -> None:
        """Update the memory that a request will need; its bucket depends on the prompt alone."""
        item = self._items.get(request_id)
        if item is not None:
            item.waiting.prediction = prediction
            self._total_length -= item.total_length
            item.total_length = self._total_length_of(item.waiting)
            self._total_length += item.total_length

    def __len__(self) -> int:
        return len(self._items)

    @property
    def waiting_tokens(self) -> int:
        return self._prompt_tokens

    def next_wake_s(self, now_s: float) -> float | None:
        """Return None: reports alone bring room, and each leads to a decision."""
        return None

    # -- decisions ---------------------------------------------------------------------------------------------

    def decide(self, now_s: float, cluster: ClusterView) -> list[Dispatch]:
        if not self._items or not self._controller.has_headroom(cluster):
            return []
        self._default_output = self._controller.demand.expected_output(cluster)
        self._fit_limit(cluster)
        round_ = self._controller.open(now_s, cluster)
        self._adjust(cluster)
        dispatches = []
        while self._items:
            instance = round_.next_batch()
            if instance is None:
                break
            dispatch = self._batch(round_, instance, cluster)
            if dispatch is None:
                round_.skip_worker()
            else:
                dispatches.append(dispatch)
        return dispatches

    def _batch(self, round_: Round, instance: InstanceId, cluster: ClusterView) -> Dispatch | None:
        """Return a batch of one bucket, led by the most urgent request; None if memory has no room for it now.

        B6 · §IV: online, the bucket whose oldest request arrived first, and within it the oldest first; offline
        requests of that bucket fill what is left of the batch by SJF or LJF, whatever waits in other buckets.
        """
        heads = [entry for entry in (self._online.oldest, self._offline.oldest) if entry is not None]
        leader = self._serials[min(heads) & SERIAL]
        bucket = self._buckets.bucket_of(leader.cell)
        capacities = [view.capacity for view in cluster.instances.values()]
        if not any(leader.positions < each.max_model_len and leader.positions <= each.positions for each in capacities):
            self._forget(leader.name)  # placement rejects it
            return self._dispatch([leader], None, "fits no worker")
        batch: list[_Item] = []
        item: _Item | None = leader
        while item is not None and len(batch) < self._controller.max_batch:
            if not round_.take(item.name, item.prompt_tokens, item.total_length, online=item.online):
                break
            self._forget(item.name)
            batch.append(item)
            item = self._next_of(bucket)
        if not batch:
            return None
        tokens = self._buckets.cell_tokens
        return self._dispatch(batch, instance, f"bucket [{bucket.low * tokens}, {bucket.high * tokens})")

    def _next_of(self, bucket: Bucket) -> _Item | None:
        low, high = bucket.low, bucket.high
        entry = self._online.first_due(low, high)
        if entry is None:
            match self._options.fill:
                case "oldest":
                    entry = self._offline.first_due(low, high)
                case "sjf":
                    entry = self._offline.shortest(low, high)
                case "ljf":
                    entry = self._offline.longest(low, high)
        return None if entry is None else self._serials[entry & SERIAL]

    def _dispatch(self, batch: list[_Item], instance: InstanceId | None, reason: str) -> Dispatch:
        lengths = [item.prompt_tokens for item in batch]
        tokens = sum(lengths)
        ratio = waste_ratio(lengths)
        self._waste = ratio if self._batches == 0 else _RECENT * self._waste + (1 - _RECENT) * ratio
        self._batches += 1
        self._batched += len(batch)
        self._real_tokens += tokens
        self._padding_tokens += max(lengths) * len(lengths) - tokens
        dispatch = Dispatch(tuple([item.name for item in batch]), self._next_batch, instance, reason)
        self._next_batch += 1
        return dispatch

    # -- buckets -----------------------------------------------------------------------------------------------

    def _adjust(self, cluster: ClusterView) -> None:
        safe_batch = self._controller.expected_batch(cluster, self._total_length / len(self._items))
        self._safe_batch = safe_batch
        rectangle = self._controller.rectangle_tokens(cluster)
        self._buckets.adjust(safe_batch, rectangle, self._prompt_tokens / len(self._items))

    def _count_between(self, low: int, high: int) -> int:
        return self._online.count(low, high) + self._offline.count(low, high)

    def _fit_limit(self, cluster: ClusterView) -> None:
        """Set L_max to what the longest worker can hold when the first registers, and whenever that grows."""
        limit = max((view.capacity.max_model_len for view in cluster.instances.values()), default=0)
        if limit and (not self._limit_known or limit > self._buckets.max_tokens):
            self._limit_known = True
            if limit != self._buckets.max_tokens:
                self._lay_out(limit)
                for item in self._items.values():
                    self._histogram.add(item.prompt_tokens)
                    self._insert(item)

    def _lay_out(self, limit: int) -> None:
        most = self._options.max_buckets
        self._buckets = BucketSet(limit, max_buckets=most, count_between=self._count_between)
        self._online = LengthIndex(self._buckets.cells)
        self._offline = LengthIndex(self._buckets.cells)
        self._histogram = LengthHistogram(limit)
        self._safe_batch = self._controller.max_batch

    # -- bookkeeping -------------------------------------------------------------------------------------------

    def _total_length_of(self, waiting: WaitingRequest) -> int:
        """Return S_i of Eq. 6: known tokens plus the output still expected, at least one more."""
        request = waiting.request
        limit = request.sampling.max_tokens
        prediction = waiting.prediction
        estimate = self._options.output_estimate
        if estimate == "max":
            output = float(limit)
        elif prediction is None or prediction.source == "default":
            output = self._default_output
        else:
            output = float(getattr(prediction, estimate))
        output = min(max(output, request.output_known + 1.0), float(limit))
        return max(len(request.tokens), request.prompt_tokens + round(output))

    def _insert(self, item: _Item) -> None:
        item.cell = self._buckets.cell_of(item.prompt_tokens)
        (self._online if item.online else self._offline).add(item.cell, item.entry)
        self._buckets.added(item.cell)

    def _forget(self, request_id: RequestId) -> None:
        item = self._items.pop(request_id, None)
        if item is None:
            return
        del self._serials[item.entry & SERIAL]
        self._prompt_tokens -= item.prompt_tokens
        self._total_length -= item.total_length
        (self._online if item.online else self._offline).remove(item.cell, item.entry)
        self._buckets.removed(item.cell)

    def buckets(self) -> list[QueueBucket]:
        highs = self._buckets.upper_bounds
        counts = [bucket.count for bucket in self._buckets.buckets]
        return [QueueBucket(*each) for each in zip([0, *highs], highs, counts, strict=False)]

    # -- figures -----------------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Return metrics. `batch_waste_ratio` is Eq. 2 (moving average over batches), `expected_waste` Eq. 3 at the
        current bounds; both are real costs on padded paths only."""
        lengths, weights = self._histogram.lengths_and_weights()
        return {
            "buckets": float(len(self._buckets)),
            "bucket_splits_total": float(self._buckets.splits),
            "bucket_merges_total": float(self._buckets.merges),
            "safe_batch": float(self._safe_batch),
            "safe_memory_bytes": float(self._controller.safe_memory_bytes),
            "batches_total": float(self._batches),
            "batched_requests_total": float(self._batched),
            "batch_waste_ratio": self._waste,
            "expected_waste": expected_waste(self._buckets.upper_bounds, lengths, weights),
            "prompt_tokens_total": float(self._real_tokens),
            "padding_tokens_total": float(self._padding_tokens),
            "waiting_online": float(len(self._online)),
            "waiting_offline": float(len(self._offline)),
        }

    def check(self) -> None:
        """Raise `InvariantViolated` when index, buckets and requests disagree."""
        self._online.check()
        self._offline.check()
        self._buckets.check(len(self._items))
