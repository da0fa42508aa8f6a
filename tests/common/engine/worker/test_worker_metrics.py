"""A worker's stats: the error of its learned iteration times, in Prometheus and in the heartbeat."""

from __future__ import annotations

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from cohort.common.engine.device import compiled_kernels
from cohort.common.engine.worker.worker_metrics import WorkerMetrics
from cohort.common.machines.manager.manager import cluster_load
from cohort.common.policies.interface import InstanceView
from cohort.common.process.metrics import MetricFactory
from cohort.common.types import EngineFacts, Role, WorkerCapacity, WorkerStats
from tests.common.machines.small_worker import machine
from tests.common.machines.worker.test_learned_by_worker import run_one


def test_the_error_of_learned_iteration_times_is_exported_by_kind() -> None:
    registry, worker = CollectorRegistry(), machine(Role.UNIFIED)
    metrics = WorkerMetrics(MetricFactory(registry, model_name="m", instance="unified"), worker, lambda: 0, lambda: 0)
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


def test_what_a_worker_computes_with_is_a_metric() -> None:
    registry, worker = CollectorRegistry(), machine(Role.UNIFIED)
    facts = EngineFacts("NVIDIA H200", "9.0", "bfloat16", "triton", "triton split-KV", "torch flash")
    capacity = msgspec.structs.replace(worker.setup.capacity, engine=facts)
    worker.setup = msgspec.structs.replace(worker.setup, capacity=capacity)
    WorkerMetrics(MetricFactory(registry, model_name="m", instance="unified"), worker, lambda: 0, lambda: 0)
    labels = {"model_name": "m", "instance": "unified", **msgspec.to_builtins(facts)}
    assert registry.get_sample_value("cohort_worker_engine", labels) == 1


def test_a_gateway_hears_each_kind_of_engine_once() -> None:
    facts = EngineFacts("NVIDIA H200", "9.0")
    views = [view(f"w{number}", engine) for number, engine in enumerate((facts, facts, None, EngineFacts("EPYC")))]
    load = cluster_load(views, ready=True, waiting=0, waiting_tokens=0, running=0, drain_rate=0.0)
    assert load.engines == [facts, EngineFacts("EPYC")]


def view(name: str, engine: EngineFacts | None) -> InstanceView:
    capacity = WorkerCapacity(Role.UNIFIED, "m", 128, 1, 1, 8, 2, 16, 8, 0, 4, 64, engine=engine)
    return InstanceView(name, capacity, WorkerStats())


def test_kernels_compiled_after_the_worker_was_ready_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = [17]  # while it warmed up
    monkeypatch.setattr(compiled_kernels, "compilations", lambda: compiled[0])
    registry, worker = CollectorRegistry(), machine(Role.UNIFIED)
    metrics = WorkerMetrics(MetricFactory(registry, model_name="m", instance="unified"), worker, lambda: 0, lambda: 0)
    labels = {"model_name": "m", "instance": "unified"}
    for total, later in ((17, 0), (19, 2), (19, 2)):
        compiled[0] = total
        metrics.export(worker.stats(0), 0)
        assert registry.get_sample_value("cohort_kernel_compilations_total", labels) == later


def test_prompts_without_flash_attention_are_counted() -> None:
    registry, worker, rows = CollectorRegistry(), machine(Role.UNIFIED), [0]
    make = MetricFactory(registry, model_name="m", instance="unified")
    metrics = WorkerMetrics(make, worker, lambda: 0, lambda: rows[0])
    for rows[0] in (0, 3, 3, 5):
        metrics.export(worker.stats(0), 0)
        labels = {"model_name": "m", "instance": "unified"}
        assert registry.get_sample_value("cohort_prefill_rows_without_flash_total", labels) == rows[0]
