from __future__ import annotations

import re

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from cohort.common.process.metrics import (
    CONTENT_TYPE,
    TTFT_STAGES,
    EngineMetrics,
    MetricFactory,
    RequestMetrics,
    SchedulerMetrics,
    TransferMetrics,
    exposition,
)


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def make(registry: CollectorRegistry) -> MetricFactory:
    return MetricFactory(registry, model_name="smol", instance="gateway")


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {"model_name": "smol", "instance": "gateway", **labels})


def test_names_that_dashboards_know(registry: CollectorRegistry, make: MetricFactory) -> None:
    families = [RequestMetrics(make), EngineMetrics(make), TransferMetrics(make)]
    names = {family.name for family in text_string_to_metric_families(exposition(registry).decode())}
    assert len(families) == 3
    for name in (
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "ttft_stage_seconds",
        "kv_transfer_seconds",
        "kv_transfer_bytes",
        "kv_transfer_failures",
        "kv_expired_leases",
    ):
        assert f"cohort_{name}" in names, name


def test_a_workers_policies_have_their_own_stats(registry: CollectorRegistry, make: MetricFactory) -> None:
    EngineMetrics(make).policy_stats("iteration", "cost_error").set(0.02)
    assert value(registry, "cohort_worker_policy", interface="iteration", metric="cost_error") == 0.02


def test_the_manager_has_its_own(registry: CollectorRegistry, make: MetricFactory) -> None:
    scheduler = SchedulerMetrics(make)
    scheduler.attempts_lost("worker lost").inc()
    scheduler.buckets().set(4)
    scheduler.padding_waste().observe(0.25)
    assert value(registry, "cohort_attempts_lost_total", reason="worker lost") == 1
    assert value(registry, "cohort_buckets") == 4
    assert value(registry, "cohort_padding_waste_ratio_bucket", le="0.3") == 1


def test_labels(registry: CollectorRegistry, make: MetricFactory) -> None:
    metrics = RequestMetrics(make)
    metrics.request_success("rt", "stop").inc()
    metrics.request_success("rt", "stop").inc()
    metrics.ttft_seconds("be").observe(0.12)
    assert value(registry, "cohort_request_success_total", **{"class": "rt", "finished_reason": "stop"}) == 2
    assert value(registry, "cohort_time_to_first_token_seconds_bucket", **{"class": "be", "le": "0.15"}) == 1
    assert value(registry, "cohort_time_to_first_token_seconds_bucket", **{"class": "be", "le": "0.1"}) == 0


def test_buckets_span_a_millisecond_to_ten_minutes(registry: CollectorRegistry, make: MetricFactory) -> None:
    RequestMetrics(make).e2e_seconds("rt").observe(1)
    text = exposition(registry).decode()
    bounds = re.findall(r'cohort_e2e_request_latency_seconds_bucket\{[^}]*le="([^"]+)"', text)
    assert (bounds[0], bounds[-2:]) == ("0.001", ["600.0", "+Inf"])


def test_ttft_decomposes(registry: CollectorRegistry, make: MetricFactory) -> None:
    metrics = RequestMetrics(make)
    metrics.observe_ttft_stages("rt", {stage: 0.01 for stage in TTFT_STAGES})
    metrics.observe_ttft_stages("rt", {"transfer": -1e-9})  # two clocks may differ by a hair
    sums = {
        stage: value(registry, "cohort_ttft_stage_seconds_sum", **{"class": "rt", "stage": stage})
        for stage in TTFT_STAGES
    }
    assert sums == {stage: 0.01 for stage in TTFT_STAGES}
    assert value(registry, "cohort_ttft_stage_seconds_count", **{"class": "rt", "stage": "transfer"}) == 2


def test_unlabelled_counters_start_at_zero(registry: CollectorRegistry, make: MetricFactory) -> None:
    TransferMetrics(make)
    assert value(registry, "cohort_kv_expired_leases_total") == 0


def test_text_format(registry: CollectorRegistry, make: MetricFactory) -> None:
    make.counter("odd", "A counter", ("what",))('quo"te\nline').inc()
    assert CONTENT_TYPE == "text/plain; version=0.0.4; charset=utf-8"
    text = exposition(registry).decode()
    assert "# TYPE cohort_odd_total counter" in text
    assert 'what="quo\\"te\\nline"' in text


def test_one_process_one_registry(make: MetricFactory) -> None:
    RequestMetrics(make)
    with pytest.raises(ValueError, match="Duplicated"):
        RequestMetrics(make)
