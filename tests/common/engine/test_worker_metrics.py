"""A worker's stats: the error of its learned iteration times, in Prometheus and in the heartbeat."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from cohort.common.engine import compiled_kernels
from cohort.common.engine.worker_metrics import WorkerMetrics
from cohort.common.metrics import MetricFactory
from cohort.common.types import Role
from tests.common.machines.small_worker import machine
from tests.common.machines.test_learned_by_worker import run_one


def test_the_error_of_learned_iteration_times_is_exported_by_kind() -> None:
    registry, worker = CollectorRegistry(), machine(Role.UNIFIED)
    metrics = WorkerMetrics(MetricFactory(registry, model_name="m", instance="unified"), worker, lambda: 0)
    before = metrics.heartbeat(worker.stats(0), 0)
    assert before["step_time_error_prefill"] == before["step_time_error_mixed"] == 0.0
    for number in range(30):
        run_one(worker, f"r{number}", 4 + 3 * (number % 10), slower=1.0 if number < 25 else 2.0)
    stats = worker.stats(0)
    metrics.export(stats, 0)
    shown = metrics.heartbeat(stats, 0)
    assert 0.02 < shown["step_time_error_prefill"] < 0.5
    assert shown["step_time_error_mixed"] == 0.0  # one request at a time never mixes
    for kind in ("prefill", "decode", "mixed"):
        labels = {"model_name": "m", "instance": "unified", "kind": kind}
        exported = registry.get_sample_value("cohort_step_time_error", labels)
        assert exported == pytest.approx(shown[f"step_time_error_{kind}"])


def test_kernels_compiled_after_the_worker_was_ready_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = [17]  # while it warmed up
    monkeypatch.setattr(compiled_kernels, "compilations", lambda: compiled[0])
    registry, worker = CollectorRegistry(), machine(Role.UNIFIED)
    metrics = WorkerMetrics(MetricFactory(registry, model_name="m", instance="unified"), worker, lambda: 0)
    labels = {"model_name": "m", "instance": "unified"}
    for total, later in ((17, 0), (19, 2), (19, 2)):
        compiled[0] = total
        metrics.export(worker.stats(0), 0)
        assert registry.get_sample_value("cohort_kernel_compilations_total", labels) == later
