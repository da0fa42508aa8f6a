"""Metrics as a terminal reads them: sums, differences, quantiles, against hand-made and real expositions."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry

from cohort.common.process.metrics import MetricFactory, RequestMetrics, exposition
from cohort.services.cli.scraped import Scraped


def test_sums_by_labels() -> None:
    scraped = Scraped('a_total{class="rt",k="1"} 3\na_total{class="rt",k="2"} 4\na_total{class="be",k="1"} 5\nb NaN\n')
    assert scraped.total("a_total") == 12 and scraped.total("a_total", **{"class": "rt"}) == 7
    assert scraped.total("absent") == 0 and scraped.total("b") == 0
    assert scraped.values("a_total", "k") == ["1", "2"]


def test_what_came_since() -> None:
    earlier, later = Scraped('a_total{i="x"} 3\na_total{i="y"} 9\n'), Scraped('a_total{i="x"} 5\na_total{i="y"} 2\n')
    grown = later.since(earlier)
    assert grown.total("a_total", i="x") == 2
    assert grown.total("a_total", i="y") == 2, "it began anew"
    assert Scraped('a_total{i="z"} 4\n').since(earlier).total("a_total") == 4


HISTOGRAM = """\
# TYPE t histogram
t_bucket{i="x",le="1.0"} 2
t_bucket{i="x",le="2.0"} 6
t_bucket{i="x",le="+Inf"} 8
t_bucket{i="y",le="1.0"} 2
t_bucket{i="y",le="2.0"} 2
t_bucket{i="y",le="+Inf"} 2
"""


@pytest.mark.parametrize(("share", "expected"), [(0.1, 0.25), (0.4, 1.0), (0.5, 1.25), (0.8, 2.0), (0.99, 2.0)])
def test_quantiles_over_all_processes(share: float, expected: float) -> None:
    assert Scraped(HISTOGRAM).quantile("t", share) == pytest.approx(expected)


def test_quantiles_of_what_our_own_processes_export() -> None:
    registry = CollectorRegistry()
    metrics = RequestMetrics(MetricFactory(registry, model_name="m", instance="gateway"))
    assert Scraped(exposition(registry).decode()).quantile("cohort_time_to_first_token_seconds", 0.5) is None
    for hundredth in range(1, 101):
        metrics.ttft_seconds("rt").observe(hundredth / 100)
    scraped = Scraped(exposition(registry).decode())
    name = "cohort_time_to_first_token_seconds"
    median = scraped.quantile(name, 0.5, **{"class": "rt"})
    assert median == pytest.approx(0.5, abs=0.05)
    assert scraped.quantile(name, 0.5, **{"class": "be"}) is None
