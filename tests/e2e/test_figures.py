"""The live page's JSON, `cohort status` and the metrics say the same of a pipeline, idle and after load."""

from __future__ import annotations

import json
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cohort.common.process.metrics import LATENCY_BUCKETS_S, quantile
from cohort.services.cli.scraped import Scraped
from cohort.services.cli.status import picture, read
from cohort.services.global_monitor.window import WINDOW_S
from tests.e2e.pipeline import Pipeline

pytestmark = pytest.mark.pipeline

HISTOGRAMS = {
    "ttft": "cohort_time_to_first_token_seconds",
    "tpot": "cohort_request_time_per_output_token_seconds",
    "itl": "cohort_inter_token_latency_seconds",
}


def page(monitor: str) -> dict[str, Any]:
    """The first state that the live page gets."""
    with urllib.request.urlopen(f"{monitor}/api/live?history_s=3600", timeout=30) as feed:
        while not (line := feed.readline()).startswith(b"data: "):
            pass
        found: dict[str, Any] = json.loads(line.removeprefix(b"data: "))
        return found


def terminal(monitor: str) -> str:
    console = Console(width=160)
    with console.capture() as captured:
        console.print(picture(read(monitor)))
    return captured.get()


def observed(metrics: Scraped, name: str, of_class: str) -> dict[float, float]:
    """A histogram's observations by bucket."""
    upper = {
        float(labels["le"]): value
        for labels, value in metrics.each(f"{HISTOGRAMS[name]}_bucket", **{"class": of_class})
    }
    below = 0.0
    counts = {}
    for bound in (*LATENCY_BUCKETS_S, float("inf")):
        counts[bound], below = upper.get(bound, 0.0) - below, upper.get(bound, 0.0)
    return counts


def agree(monitor: str) -> dict[str, Any]:
    """Compare page, terminal and metrics of a pipeline to which nothing happens meanwhile and that is younger than the
    window; return the page's figures."""
    shown, text, metrics = page(monitor), terminal(monitor), Scraped.of(monitor)
    figures = shown["cluster"]["last_minute"]
    for of_class, each in figures["classes"].items():
        for name in HISTOGRAMS:
            counts = observed(metrics, name, of_class)
            for share, which in ((0.5, "p50_s"), (0.99, "p99_s")):
                assert each[name][which] == pytest.approx(quantile(counts, share)), (of_class, name, which)
        row = next(line for line in text.splitlines() if line.split()[:1] == [of_class])
        for latency in (each["ttft"]["p50_s"], each["ttft"]["p99_s"], each["tpot"]["p50_s"]):
            assert latency is None or f"{1000 * latency:.0f} ms" in row or f"{latency:.1f} s" in row
        for objective, (met, missed) in each["slo"].items():
            judged = {"class": of_class, "objective": objective}
            assert metrics.total("cohort_slo_requests_total", **judged, outcome="met") == met
            assert metrics.total("cohort_slo_requests_total", **judged, outcome="missed") == missed
            assert f"{objective} {100 * met / (met + missed):.1f} %" in row
    for reason, count in figures["refused"].items():
        counted = ("cohort_rejections_total", "cohort_requests_refused_total")
        assert sum(metrics.total(name, reason=reason) for name in counted) == count
        assert f"{count} {reason}" in text
    for each in shown["cluster"]["processes"]:
        if total := each["stats"].get("kv_total_blocks"):
            name, use = each["instance"], each["stats"]["kv_used_blocks"] / total
            assert metrics.total("cohort_kv_cache_usage_perc", instance=name) == pytest.approx(use)
            assert metrics.total("cohort_kv_blocks", instance=name, state="cached") == each["stats"]["kv_cached_blocks"]
            row = next(line for line in text.splitlines() if line.split()[:1] == [name])
            assert f" {100 * use:3.0f} %" in row
    seconds = figures["seconds"]
    tokens = metrics.total("cohort_generation_tokens_total")
    assert figures["output_tokens_per_s"] * seconds == pytest.approx(tokens, rel=0.05, abs=0.1)
    return figures  # type: ignore[no-any-return]


def test_page_terminal_and_metrics_agree(tmp_path: Path, small_model: Path) -> None:
    with Pipeline(tmp_path, small_model) as pipeline:
        monitor = f"http://127.0.0.1:{pipeline.config.monitor.port}"
        idle = agree(monitor)
        assert idle["output_tokens_per_s"] == 0.0 and idle["refused"] == {} and idle["failed"] == 0
        assert "idle" in terminal(monitor)
        since_s = time.monotonic()
        bodies = [
            {"prompt": "Once upon a time", "max_tokens": 6 + n % 5, "cohort": {"class": ("rt", "be")[n % 4 == 3]}}
            for n in range(16)
        ]
        assert all(answer.finish for answer in pipeline.complete_all(bodies))
        assert pipeline.complete_all([{"prompt": "x", "max_tokens": -1}])[0].error
        pipeline.wait_told("gateway", *(name for name in pipeline.config.instance_roles))
        pipeline.assert_nothing_left()
        time.sleep(1.1)  # the workers' metrics are as old as their reports
        if time.monotonic() - since_s > WINDOW_S - 15:
            pytest.skip("this machine was too slow: the load leaves the window")
        loaded = agree(monitor)
        assert loaded["classes"]["rt"]["ttft"]["p50_s"] and loaded["classes"]["be"]["tpot"]["p99_s"]
        assert loaded["classes"]["rt"]["slo"]["ttft"] and loaded["refused"] == {"invalid": 1}
