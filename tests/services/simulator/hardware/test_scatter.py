"""Iterations that scatter: by the measured share, about the same mean, and the same however they are run."""

from __future__ import annotations

from functools import cache
from statistics import fmean, pstdev

import pytest

from cohort.services.simulator.core.report import make_report
from cohort.services.simulator.hardware.scatter import StepScatter
from tests.services.simulator.core.test_cluster import outcome
from tests.services.simulator.lab import Recorded, cluster, config, run, workload

LOAD = workload(*((0.05 * i, 60 + 17 * i, 30 + 5 * i) for i in range(12)))


@cache
def scattered(variation: float | None, **options: object) -> Recorded:
    return run(config(), cluster(2), LOAD, scatter=variation, **options)


def test_factors_have_mean_one_and_the_variation_asked_for() -> None:
    scatter = StepScatter(0.2, 3)
    found = [scatter.factor(1, step) for step in range(20_000)]
    assert fmean(found) == pytest.approx(1.0, abs=0.01)
    assert pstdev(found) == pytest.approx(0.2, rel=0.05)
    assert min(found) > 0.0


def test_what_lasts_is_shared_by_many_steps() -> None:
    """Means of 20 neighbours: of what is each step's own they would scatter by 0.2 / 4.5."""

    def scattering(lasting: float) -> tuple[float, float, float]:
        scatter = StepScatter(0.2, 3, lasting)
        factors = [scatter.factor(1, step) for step in range(20_000)]
        return fmean(factors), pstdev(factors), pstdev(fmean(factors[at : at + 20]) for at in range(0, 20_000, 20))

    mean, varying, neighbours = scattering(0.6)
    assert (mean, varying) == pytest.approx((1.0, 0.2), rel=0.08)
    assert neighbours == pytest.approx(0.2 * 0.6**0.5, rel=0.2)
    assert scattering(0.0)[2] == pytest.approx(0.2 / 20**0.5, rel=0.1)


@pytest.mark.parametrize(("prompts_s", "variation"), [(0.25, 0.06), (1.0, 0.03), (4.0, 0.015), (0.0001, 0.2)])
def test_the_longer_prompts_take_the_less_they_scatter(prompts_s: float, variation: float) -> None:
    """By the root of the time, and never more than decodes; each by itself."""
    scatter = StepScatter(0.2, 3, 0.9, 0.03)
    found = [scatter.factor(1, step, prompts_s) for step in range(20_000)]
    assert (fmean(found), pstdev(found)) == pytest.approx((1.0, variation), rel=0.05)
    neighbours = pstdev(fmean(found[at : at + 20]) for at in range(0, 20_000, 20))
    assert neighbours == pytest.approx(variation / 20**0.5, rel=0.15)
    assert StepScatter(0.2, 3, 0.9).factor(1, 7, prompts_s) == scatter.factor(1, 7), "as decodes, where none is known"


def test_instances_and_seeds_scatter_apart() -> None:
    one, other = StepScatter(0.2, 0), StepScatter(0.2, 1)
    assert [one.factor(0, step) for step in range(5)] == [StepScatter(0.2, 0).factor(0, step) for step in range(5)]
    assert one.factor(0, 1) != one.factor(1, 1) and one.factor(0, 1) != other.factor(0, 1)


def test_no_variation_changes_nothing() -> None:
    assert not StepScatter(0.0, 0) and StepScatter(0.0, 0).factor(3, 7) == 1.0
    assert outcome(scattered(None)) == outcome(scattered(0.0))


def test_steps_run_ahead_take_what_they_take_one_by_one() -> None:
    ahead, singly = scattered(0.3), scattered(0.3, jump=False)
    for name, times in singly.token_times.items():
        assert ahead.token_times[name] == pytest.approx(times, rel=1e-9)
    assert scattered(0.3, seed=1).token_times != ahead.token_times


def test_tokens_come_less_evenly_but_no_slower() -> None:
    even, uneven = scattered(0.0).clients.all.tbt, scattered(0.3).clients.all.tbt
    assert uneven.quantile(0.99) > 1.2 * even.quantile(0.99)
    assert uneven.sum_s / uneven.count == pytest.approx(even.sum_s / even.count, rel=0.1)


def test_the_report_says_so() -> None:
    assert "iterations scatter by 30 %" in make_report(scattered(0.3), "w", LOAD.facts).notes
    assert not [note for note in make_report(scattered(None), "w", LOAD.facts).notes if "scatter" in note]
