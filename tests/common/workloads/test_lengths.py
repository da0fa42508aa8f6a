"""Length distributions: parsing of what a user types, statistics of what is drawn."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cohort.common.errors import ConfigError
from cohort.common.workloads.lengths import (
    Fixed,
    LogNormal,
    Shape,
    Uniform,
    draw,
    draw_shapes,
    parse_distribution,
    parse_mix,
)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def test_parses_each_kind() -> None:
    assert parse_distribution("128", "--input-len") == Fixed(128)
    assert parse_distribution("uniform:64-512", "--input-len") == Uniform(64, 512)
    assert parse_distribution("lognormal:mu=4.98,sigma=0.92,max=2048", "--input-len") == LogNormal(4.98, 0.92, 1, 2048)


def test_mean_and_std_become_mu_and_sigma() -> None:
    """Hand: sigma² = ln(1 + (100/100)²) = ln 2; mu = ln 100 - ln(2)/2."""
    found = parse_distribution("lognormal:mean=100,std=100", "--input-len")
    assert isinstance(found, LogNormal)
    assert found.sigma == pytest.approx(math.sqrt(math.log(2)))
    assert found.mu == pytest.approx(math.log(100) - math.log(2) / 2)


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "",
        "abc",
        "-5",
        "uniform:5",
        "uniform:9-3",
        "uniform:0-3",
        "lognormal:mean=3",
        "lognormal:mu=x,sigma=1",
        "lognormal:mu=1,sigma=-1",
        "lognormal:mean=0,std=1",
        "lognormal:mu=1,sigma=1,min=9,max=3",
        "lognormal:a=1,b=2",
    ],
)
def test_wrong_lengths_name_the_option(text: str) -> None:
    with pytest.raises(ConfigError, match="--output-len"):
        parse_distribution(text, "--output-len")


def test_uniform_reaches_both_ends_evenly() -> None:
    counts = np.bincount(draw(Uniform(3, 6), rng(), 40_000))[3:]
    assert len(counts) == 4
    assert all(abs(int(count) - 10_000) < 400 for count in counts)


def test_lognormal_has_the_asked_mean_and_spread() -> None:
    distribution = parse_distribution("lognormal:mean=222,std=256", "--input-len")
    values = draw(distribution, rng(), 200_000)
    assert values.mean() == pytest.approx(222, rel=0.02)
    assert values.std() == pytest.approx(256, rel=0.05)
    assert values.min() >= 1


def test_lognormal_is_clipped() -> None:
    values = draw(LogNormal(4.0, 2.0, 10, 100), rng(), 1000)
    assert (values.min(), values.max()) == (10, 100)


@pytest.mark.parametrize("distribution", [Fixed(7), Uniform(1, 1000), LogNormal(4, 1)])
def test_a_shorter_draw_is_a_prefix_of_a_longer_one(distribution: Fixed | Uniform | LogNormal) -> None:
    assert list(draw(distribution, rng(3), 10)) == list(draw(distribution, rng(3), 1000)[:10])


def test_mix_parses_and_draws_by_weight() -> None:
    mix = parse_mix("0.8:64x64,0.2:768x32")
    assert mix == (Shape(0.8, 64, 64), Shape(0.2, 768, 32))
    drawn = draw_shapes(mix, rng(), 10_000)
    assert sum(shape.label == "768x32" for shape in drawn) / 10_000 == pytest.approx(0.2, abs=0.015)


def test_weights_need_not_sum_to_one() -> None:
    drawn = draw_shapes(parse_mix("3:1x1,1:2x2"), rng(), 10_000)
    assert sum(shape.label == "1x1" for shape in drawn) / 10_000 == pytest.approx(0.75, abs=0.015)


@pytest.mark.parametrize("text", ["64x64", "0.5:64", "0:64x64", "1:0x5", "1:5x0", "1.2.3:5x5", "", "1:5x5,"])
def test_wrong_mix_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--mix"):
        parse_mix(text)
