"""Drafts in simulated time: rates of requests about a mean, the same answers in fewer iterations, none under load."""

from __future__ import annotations

from statistics import fmean

import pytest

from cohort.services.simulator.core.report import make_report
from cohort.services.simulator.hardware.acceptance import Acceptance, DraftRates
from tests.services.simulator.core.test_cluster import outcome
from tests.services.simulator.lab import Recorded, cluster, config, run, workload

ALONE = workload(*((2.0 * i, 60 + 17 * i, 60 + 5 * i) for i in range(12)))
TOGETHER = workload(*((0.0, 60 + i, 60) for i in range(48)))


def _drafting(load: object = ALONE, mode: str = "lookup", **options: object) -> Recorded:
    return run(config(speculation={"mode": mode}), cluster(1), load, **options)  # type: ignore[arg-type]


def _steps(sim: Recorded) -> int:
    return sum(worker.tally.steps for worker in sim.workers)


def _drafted(sim: Recorded) -> int:
    return sum(sum(worker.machine.counters.drafted_tokens.values()) for worker in sim.workers)


def test_rates_of_requests_lie_about_the_mean_and_apart() -> None:
    acceptance = Acceptance(0.6, 0)
    rates = [acceptance.rates(index).right for index in range(2000)]
    assert fmean(rates) == pytest.approx(0.6, abs=0.03)
    assert min(rates) < 0.05 and max(rates) > 0.95


def test_a_request_s_drafts_are_right_as_often_as_its_rate_says() -> None:
    acceptance = Acceptance(0.6, 0)
    for index in range(5):
        first = [acceptance.right(index, position, 1) for position in range(4000)]
        assert fmean(first) == pytest.approx(acceptance.rates(index).right, abs=0.03)
    assert Acceptance(1.0, 0).right(3, 5, 8) == 8


def test_requests_take_recorded_rates_in_turn() -> None:
    acceptance = Acceptance(0.0, 0, [DraftRates(0.25, 1.0), DraftRates(1.0, 0.0)])
    assert acceptance and not Acceptance(0.0, 0, [DraftRates(1.0, 0.0)])
    for index, share in ((0, 0.25), (1, 1.0), (2, 0.25)):
        expected = [acceptance.expects(index, position) for position in range(4000)]
        assert fmean(expected) == pytest.approx(share, abs=0.03)
        assert acceptance.right(index, 7, 4) == (4 if share < 1.0 else 0)


def test_answers_are_as_long_and_take_fewer_iterations() -> None:
    plain, drafted = _drafting(mode="off"), _drafting(acceptance=0.8)
    assert {name: len(times) for name, times in drafted.token_times.items()} == {
        name: len(times) for name, times in plain.token_times.items()
    }
    assert _drafted(plain) == 0 < _drafted(drafted)
    assert _steps(drafted) < 0.7 * _steps(plain)
    assert drafted.clients.last_end_s < plain.clients.last_end_s
    assert any("tokens drafted in" in note for note in make_report(drafted, "w", ALONE.facts).notes)


def test_nothing_is_drafted_where_nothing_is_expected() -> None:
    plain = _drafting(mode="off", acceptance=0.8, jump=False)
    assert outcome(_drafting(acceptance=0.0)) == outcome(plain)


def test_one_seed_is_one_run() -> None:
    assert outcome(_drafting(acceptance=0.7, seed=3)) == outcome(_drafting(acceptance=0.7, seed=3, jump=False))


def test_more_rows_than_drafts_are_worth_it_for_have_none() -> None:
    plain, drafted = _drafting(TOGETHER, mode="off"), _drafting(TOGETHER, acceptance=0.8)
    assert drafted.clients.last_end_s <= 1.02 * plain.clients.last_end_s
