"""The stopwatch sees every decision and changes none."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.interface import ClusterView, InstanceView, PrefillOrder, WaitingRequest
from cohort.common.process.metrics import MetricFactory, SchedulerMetrics
from cohort.common.types import Attempt, Prediction, Request, Role, SamplingParams, WorkerCapacity
from cohort.services.bucketing_manager.measured import MeasuredOrder


class OneBatch(Fcfs):
    """Everything in one batch."""

    def decide(self, now_s: float, cluster: ClusterView) -> list:  # type: ignore[type-arg]
        dispatches = super().decide(now_s, cluster)
        names = tuple(name for dispatch in dispatches for name in dispatch.request_ids)
        return [type(dispatches[0])(names, 1, None, "all")] if dispatches else []


def waiting(name: str, prompt: int) -> WaitingRequest:
    return WaitingRequest(
        Request(Attempt(name, 1), "g", [0] * prompt, prompt, SamplingParams(max_tokens=5), 0.0), 0.0, None
    )


def test_decisions_pass_through_and_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(MetricFactory(registry, model_name="m", instance="manager"))
    measured: PrefillOrder = MeasuredOrder(OneBatch(dispatch_ahead_tokens=1000), metrics)
    cluster = ClusterView(
        {"u": InstanceView("u", WorkerCapacity(Role.UNIFIED, "m", 1000, 1, 1, 1, 1, 16, 100, 0, 64, 512))}
    )
    for name, prompt in (("a", 20), ("b", 60), ("c", 100), ("gone", 900)):
        measured.add(0.0, waiting(name, prompt))
    measured.remove(0.0, "gone")
    measured.revise(0.0, "a", Prediction(1.0, 1.0, 1.0, 1.0))
    assert len(measured) == 3
    assert measured.waiting_tokens == 180
    assert measured.next_wake_s(0.0) is None
    assert [dispatch.request_ids for dispatch in measured.decide(0.0, cluster)] == [("a", "b", "c")]
    assert measured.metrics() == {"buckets": 1.0}
    labels = {"model_name": "m", "instance": "manager"}

    def value(name: str, **more: str) -> float | None:
        return registry.get_sample_value(f"cohort_{name}", {**labels, **more})

    assert value("placed_batch_size_sum") == 3.0
    assert value("padding_waste_ratio_sum") == pytest.approx(0.4)  # (100 − 60) / 100
    assert value("prefill_order", metric="buckets") == 1.0
    assert value("decision_seconds_count", interface="prefill_order") == 1.0
    assert value("decision_seconds_count", interface="prefill_order_add") == 4.0
