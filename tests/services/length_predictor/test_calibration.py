"""Online calibration finds the promised coverage again after the workload has moved."""

from __future__ import annotations

import numpy as np

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


def test_the_mean_is_left_alone() -> None:
    calibration = OnlineCalibration()
    calibration.shifts += 1.0
    assert calibration.adjusted(np.array([1.0, 1.0, 1.0, 1.0])).tolist() == [1.0, 2.0, 2.0, 2.0]
