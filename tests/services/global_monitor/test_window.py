"""Figures of the last minute, from heartbeats of processes that restart and stop, against counts made by hand."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from cohort.common.messages import Heartbeat
from cohort.common.process.metrics import MetricFactory, RequestMetrics
from cohort.services.global_monitor.aggregate import Cluster
from cohort.services.global_monitor.window import WINDOW_S, Growth, Latency, figures, summed


def grown(growth: Growth, now_s: float) -> float:
    return growth.since(now_s)["requests_total"][0]


def test_what_is_older_than_a_minute_does_not_count() -> None:
    growth = Growth()
    for second in range(0, 201):
        growth.note(float(second), 1, {"requests_total": 5.0 + 2.0 * min(second, 120)}, {})
    assert growth.since(120.0) == growth.since(120.0)
    assert grown(growth, 200.0) == 0.0

    growth = Growth()
    for second in range(0, 91):
        growth.note(float(second), 1, {"requests_total": 2.0 * second}, {})
    assert grown(growth, 90.0) == 2.0 * WINDOW_S
    assert grown(growth, 120.0) == 2.0 * 30, "it is silent: the window goes on"
    assert grown(growth, 500.0) == 0.0


def test_a_restart_counts_from_zero_and_what_came_before_the_first_heartbeat_does_not() -> None:
    growth = Growth()
    growth.note(0.0, 1, {"requests_total": 1000.0}, {"slo rt ttft": [5.0, 1.0]})
    growth.note(1.0, 1, {"requests_total": 1004.0}, {"slo rt ttft": [6.0, 1.0], "slo be ttft": [3.0, 0.0]})
    growth.note(2.0, 2, {"requests_total": 3.0}, {})
    growth.note(3.0, 2, {"requests_total": 6.0}, {"slo rt ttft": [2.0, 2.0]})
    assert growth.since(3.0) == {"requests_total": [10.0], "slo rt ttft": [3.0, 2.0], "slo be ttft": [3.0, 0.0]}


def test_a_heartbeat_without_its_numbers_takes_nothing_back() -> None:
    growth = Growth()
    growth.note(0.0, 1, {"requests_total": 1000.0}, {})
    growth.note(1.0, 1, {"requests_total": 1004.0}, {})
    growth.note(2.0, 1, {}, {})
    assert grown(growth, 2.0) == 4.0


def test_gateways_are_summed_and_refusals_have_their_reasons() -> None:
    one = {"requests_total": [6.0], "refused infeasible": [2.0], "refused busy": [0.0], "slo rt ttft": [3.0, 1.0]}
    other = {"requests_total": [6.0], "refused infeasible": [1.0], "failed_total": [2.0], "slo rt ttft": [1.0, 0.0]}
    shown = figures(summed([one, other]), 30.0)
    assert (shown.seconds, shown.arrivals_per_s, shown.failed) == (30.0, 0.4, 2)
    assert shown.refused == {"infeasible": 3}
    assert shown.classes["rt"].slo == {"ttft": (4, 1)} and shown.classes["be"].slo == {}
    assert shown.classes["rt"].ttft == Latency(None, None)


def test_latencies_are_of_the_histograms_that_prometheus_has() -> None:
    """A slow past beyond the window leaves no trace; within a bucket the quantile is interpolated."""
    metrics = RequestMetrics(MetricFactory(CollectorRegistry(), model_name="m", instance="gateway"))
    watched = Cluster(silence_s=3.0)

    def beat(second: int) -> None:
        counts = {f"ttft {labels[0]}": child.counts for labels, child in metrics.ttft_seconds.children()}
        watched.on_heartbeat(float(second), Heartbeat("gateway", "gateway", 1, 1, True, "", {}, counts=counts))
        watched.tick(float(second))

    beat(0)
    for _ in range(1000):
        metrics.ttft_seconds("rt").observe(50.0)
    beat(1)
    assert watched.figures(1.0).classes["rt"].ttft.p50_s == pytest.approx(60.0)  # between 40 and 80
    assert watched.samples[-1].rt_ttft_p50_s == pytest.approx(60.0)
    for second in range(2, 63):
        metrics.ttft_seconds("rt").observe(0.3)
        beat(second)
    shown = watched.figures(62.0)
    assert shown.classes["rt"].ttft.p50_s == pytest.approx(0.375) and shown.classes["be"].ttft.p50_s is None
    assert shown.classes["rt"].ttft.p99_s == pytest.approx(0.25 + 0.99 * 0.25)
