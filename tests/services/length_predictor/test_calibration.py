"""Online calibration finds the promised coverage again after the workload has moved."""

from __future__ import annotations

import numpy as np
import pytest

from cohort.services.length_predictor.calibration import OnlineCalibration


def run(calibration: OnlineCalibration, drift: float, log_limit: float, rows: int) -> float:
    """Share of answers below p90 over the last half; answers are e^drift longer than the model thinks."""
    random = np.random.default_rng(5)
    below = []
    raw = np.array([4.5, 4.0, 4.64, 5.16])  # mean, then quantiles of N(4, 0.5)
    for _ in range(rows):
        predicted = calibration.adjusted(raw)
        actual = random.normal(4.0 + drift, 0.5)
        below.append(actual <= predicted[2])
        calibration.observe(predicted, min(actual, log_limit), log_limit)
    return float(np.mean(below[rows // 2 :]))


def test_p90_recovers_after_answers_got_longer() -> None:
    assert 0.85 <= run(OnlineCalibration(), drift=0.8, log_limit=9.0, rows=3000) <= 0.95


def test_p90_recovers_after_answers_got_shorter() -> None:
    assert 0.85 <= run(OnlineCalibration(), drift=-0.8, log_limit=9.0, rows=3000) <= 0.95


def test_a_limit_below_the_quantile_teaches_it_nothing() -> None:
    calibration = OnlineCalibration()
    predicted = calibration.adjusted(np.array([4.5, 4.0, 4.6, 5.2]))
    calibration.observe(predicted, 4.3, log_limit=4.3)
    assert calibration.shifts[0] > 0
    assert calibration.shifts[1:].tolist() == [0.0, 0.0]


def test_the_mean_follows_answers_that_are_a_third_as_long() -> None:
    random = np.random.default_rng(5)
    calibration, raw = OnlineCalibration(), np.array([4.125, 4.0, 4.64, 5.16])
    for _ in range(400):
        calibration.observe(calibration.adjusted(raw), random.normal(4.0 - np.log(3.0), 0.5), log_limit=9.0)
    assert np.exp(calibration.adjusted(raw)[0] - raw[0]) == pytest.approx(1 / 3, rel=0.25)
