"""The second prediction: learns what the hidden state knows, is silent while it knows nothing, survives a restart."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from cohort.services.length_predictor.refinement import Floats, Refiner


class Habit:
    """Lengths that one direction of the state decides, and that prompt features cannot see. States of real models lie
    near a space of few dimensions; here of twenty."""

    def __init__(self, hidden_size: int, seed: int = 0, *, strength: float = 0.8) -> None:
        self.random = np.random.default_rng(seed)
        self.mixing = self.random.normal(size=(20, hidden_size))
        self.direction = self.random.normal(size=20)
        self.direction *= strength / float(np.linalg.norm(self.direction))

    def request(self) -> tuple[float, Floats, float]:
        """Base log mean, hidden state, log length."""
        base = float(self.random.normal(5.0, 0.5))
        factors = self.random.normal(size=20)
        real = base + float(factors @ self.direction) + float(self.random.normal(0.0, 0.15))
        return base, factors @ self.mixing * 7.0, real  # the scale of a state says nothing


def learn(refiner: Refiner, habit: Habit, count: int) -> None:
    for _ in range(count):
        base, hidden, real = habit.request()
        refiner.learn(base, hidden, round(math.exp(real)), 100_000, False)


@pytest.mark.parametrize("hidden_size", [24, 700])
def test_it_learns_beyond_prompt_features(hidden_size: int) -> None:
    habit, refiner = Habit(hidden_size), Refiner(hidden_size)
    base, hidden, _ = habit.request()
    assert refiner.predict_log(base, hidden)[0] == pytest.approx(base)  # nothing learned: the base itself
    assert not refiner.better
    learn(refiner, habit, 1500)
    assert refiner.better
    errors = []
    for _ in range(200):
        base, hidden, real = habit.request()
        errors.append((abs(base - real), abs(refiner.predict_log(base, hidden)[0] - real)))
    base_error, refined_error = np.mean(errors, axis=0)
    assert refined_error < 0.5 * base_error


def test_its_ninety_per_cent_quantile_covers_about_ninety_per_cent() -> None:
    habit, refiner = Habit(24), Refiner(24)
    learn(refiner, habit, 800)
    below = []
    for _ in range(800):
        base, hidden, real = habit.request()
        below.append(real <= refiner.predict_log(base, hidden)[2])
        refiner.learn(base, hidden, round(math.exp(real)), 100_000, False)
    assert 0.85 < np.mean(below) < 0.95


def test_a_state_that_says_nothing_is_not_listened_to() -> None:
    habit, refiner = Habit(24, strength=0.0), Refiner(24)
    learn(refiner, habit, 1000)
    assert not refiner.better
    base, hidden, _ = habit.request()
    assert abs(refiner.predict_log(base, hidden)[0] - base) < 0.4


def test_a_truncated_answer_teaches_only_that_it_is_longer() -> None:
    refiner = Refiner(4)
    state = np.array([1.0, -2.0, 0.5, 3.0])
    refiner.learn(math.log(500.0), state, 100, 100, True)
    assert refiner.learned == 0
    for _ in range(50):
        refiner.learn(math.log(50.0), state, 100, 100, True)
    assert refiner.learned > 0
    assert refiner.predict_log(math.log(50.0), state)[0] > math.log(80.0)


def test_no_state_moves_a_prediction_without_bound() -> None:
    refiner = Refiner(3)
    for _ in range(300):
        refiner.learn(2.0, np.array([1.0, 0.0, 0.0]), 1_000_000, 10_000_000, False)
    assert refiner.predict_log(2.0, np.array([1.0, 0.0, 0.0]))[0] == pytest.approx(4.0)
    assert np.isfinite(refiner.predict_log(2.0, np.zeros(3))).all()


def test_learned_state_survives_a_restart_of_the_same_model_only(tmp_path: Path) -> None:
    habit, refiner = Habit(24), Refiner(24)
    learn(refiner, habit, 300)
    path = tmp_path / "deep" / "state.npz"
    refiner.save(path)
    base, hidden, real = habit.request()
    again = Refiner.load(path, 24)
    assert again.learned == refiner.learned
    assert again.better == refiner.better
    assert again.predict_log(base, hidden).tolist() == refiner.predict_log(base, hidden).tolist()
    again.learn(base, hidden, round(math.exp(real)), 1000, False)
    assert Refiner.load(path, 48).learned == 0
    path.write_bytes(b"not a file of ours")
    assert Refiner.load(path, 24).learned == 0
    assert Refiner.load(tmp_path / "missing.npz", 24).learned == 0


def test_forgetting_leaves_it_stable() -> None:
    """Thousands of equal states excite one direction only; the others must not blow up."""
    refiner = Refiner(16)
    random = np.random.default_rng(0)
    state = random.normal(size=16)
    for _ in range(20_000):
        refiner.learn(3.0, state, 40, 1000, False)
    assert refiner.predict_log(3.0, state)[0] == pytest.approx(math.log(40.0), abs=0.05)
    assert abs(refiner.predict_log(3.0, random.normal(size=16))[0] - 3.0) <= 2.0
    assert float(np.trace(refiner._covariance)) <= refiner._trace * 1.001
