"""The named workloads have the means, bounds and rates that the papers print."""

from __future__ import annotations

import numpy as np
import pytest

from cohort.common.errors import ConfigError
from cohort.common.workloads.arrivals import RandomArrivals
from cohort.common.workloads.lengths import draw, fitted_lognormal
from cohort.common.workloads.papers import SHAPES, paper_workload


@pytest.mark.parametrize(
    ("name", "prompt_mean", "output_mean"),
    [
        ("bros-sharegpt", 222.76, 234.51),
        ("bros-lmsys", 90.50, 237.04),
        ("bros-best-effort", 768, 80),
        ("ecoserve-alpaca", 19.31, 58.41),
        ("ecoserve-sharegpt", 161.31, 337.99),
        ("ecoserve-bookcorpus", 1952.11, 681.2),
        ("bucketserve-alpaca", 83, 58.41),
        ("dynaserve-code", 8192, 32),
        ("dynaserve-balanced", 2048, 512),
        ("dynaserve-reasoning", 219, 1467),
    ],
)
def test_means_are_the_papers(name: str, prompt_mean: float, output_mean: float) -> None:
    lengths = SHAPES[name].lengths
    assert draw(lengths.prompt, np.random.default_rng(0), 60_000).mean() == pytest.approx(prompt_mean, rel=0.015)
    assert draw(lengths.output, np.random.default_rng(1), 60_000).mean() == pytest.approx(output_mean, rel=0.015)


def test_longbench_has_its_median_and_bookcorpus_ends_at_its_chunk() -> None:
    long = draw(SHAPES["bucketserve-longbench"].lengths.prompt, np.random.default_rng(0), 60_000)
    assert np.median(long) == pytest.approx(41_417, rel=0.02)
    book = draw(SHAPES["ecoserve-bookcorpus"].lengths.prompt, np.random.default_rng(0), 60_000)
    assert book.max() == 2048
    assert (book == 2048).mean() == pytest.approx(0.905, abs=0.01)


@pytest.mark.parametrize("bounds", [(16, 991), (1, 400), (200, 5000)])
def test_the_fit_hits_its_mean_after_clipping(bounds: tuple[int, int]) -> None:
    values = draw(fitted_lognormal(300.0, 250.0, *bounds), np.random.default_rng(0), 100_000)
    assert values.mean() == pytest.approx(300, rel=0.01)
    assert values.min() >= bounds[0] and values.max() <= bounds[1]


def test_a_mean_outside_its_bounds_is_refused() -> None:
    with pytest.raises(ConfigError, match="a mean of 5 cannot"):
        fitted_lognormal(5.0, 1.0, 10, 20)


def test_paper_rates_apply_unless_told_otherwise() -> None:
    own = paper_workload("ecoserve-sharegpt", count=3000)
    assert own.rate_per_s == pytest.approx(28.0, rel=0.06)
    assert own.facts.source == "EcoServe Table 2, ShareGPT"
    assert own.facts.notes
    assert paper_workload("bros-lmsys", RandomArrivals(4.0), count=3000).rate_per_s == pytest.approx(4.0, rel=0.06)
    with pytest.raises(ConfigError, match="the paper sweeps the rate"):
        paper_workload("bros-lmsys", count=10)
    with pytest.raises(ConfigError, match="no workload named 'x'; there are: bros-sharegpt"):
        paper_workload("x")
