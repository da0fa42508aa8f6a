"""The manager's `PrefillOrder` with a stopwatch: its decisions and their cost, as metrics.

Wraps the order that the configuration names; changes no decision. Hosted by `service.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from cohort.common.policies.interface import ClusterView, Dispatch, PrefillOrder, WaitingRequest
from cohort.common.process.metrics import SchedulerMetrics
from cohort.common.types import Prediction, QueueBucket, RequestId


class MeasuredOrder(PrefillOrder):
    """B9, B11 · time per decision, batch sizes and the order's own stats (bucket count, Eq. 2, Eq. 3 …)."""

    def __init__(self, order: PrefillOrder, metrics: SchedulerMetrics) -> None:
        self._order = order
        self._metrics = metrics
        self._lengths: dict[RequestId, int] = {}

    def add(self, now_s: float, waiting: WaitingRequest) -> None:
        started_s = time.perf_counter()
        self._order.add(now_s, waiting)
        self._metrics.decision_seconds("prefill_order_add").observe(time.perf_counter() - started_s)
        self._lengths[waiting.request_id] = len(waiting.request.tokens)

    def remove(self, now_s: float, request_id: RequestId) -> None:
        self._lengths.pop(request_id, None)
        self._order.remove(now_s, request_id)

    def revise(self, now_s: float, request_id: RequestId, prediction: Prediction) -> None:
        self._order.revise(now_s, request_id, prediction)

    def decide(self, now_s: float, cluster: ClusterView) -> list[Dispatch]:
        started_s = time.perf_counter()
        dispatches = self._order.decide(now_s, cluster)
        self._metrics.decision_seconds("prefill_order").observe(time.perf_counter() - started_s)
        for dispatch in dispatches:
            lengths = [self._lengths.pop(request_id, 0) for request_id in dispatch.request_ids]
            self._metrics.batch_size().observe(len(lengths))
            # Eq. 2 of BucketServe for any order, so that orders can be compared on what padding would cost them.
            longest = max(lengths, default=0)
            if longest:
                self._metrics.padding_waste().observe(1.0 - sum(lengths) / (longest * len(lengths)))
        return dispatches

    def next_wake_s(self, now_s: float) -> float | None:
        return self._order.next_wake_s(now_s)

    def __len__(self) -> int:
        return len(self._order)

    @property
    def waiting_tokens(self) -> int:
        return self._order.waiting_tokens

    def buckets(self) -> Sequence[QueueBucket]:
        return self._order.buckets()

    def metrics(self) -> dict[str, float]:
        metrics = self._order.metrics()
        for name, value in metrics.items():
            self._metrics.order_stats(name).set(value)
        return metrics
