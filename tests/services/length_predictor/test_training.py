"""The model learns what decides lengths, says how sure it is, and is not fooled by answers that were cut off."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import pytest

from cohort.services.length_predictor import training
from cohort.services.length_predictor.buffer import Dataset, Observation
from cohort.services.length_predictor.model import LengthModel, default_prediction, to_prediction
from cohort.services.length_predictor.training import train
from tests.counting import lines_run

if TYPE_CHECKING:
    from .conftest import World


@pytest.fixture(scope="module")
def model(large_dataset: Dataset) -> LengthModel:
    return train(large_dataset, version=1)


def held_out(world: World, rows: int = 600) -> list[Observation]:
    world.random = np.random.default_rng(99)
    return [world.observation() for _ in range(rows)]


def test_beats_the_mean_by_far_on_requests_it_has_not_seen(
    model: LengthModel, large_dataset: Dataset, world: World
) -> None:
    rows = held_out(world)
    actual = np.array([row.output_tokens for row in rows])
    predicted = np.array([to_prediction(model.predict_log(row.vector), row.max_tokens).mean for row in rows])
    model_error = np.abs(predicted - actual).mean()
    mean_error = np.abs(large_dataset.output_tokens.mean() - actual).mean()
    assert model_error < 0.6 * mean_error
    assert predicted.mean() == pytest.approx(actual.mean(), rel=0.15)


def test_quantiles_cover_their_share(model: LengthModel, world: World) -> None:
    rows = held_out(world)
    predictions = [to_prediction(model.predict_log(row.vector), row.max_tokens) for row in rows]
    below = {
        name: np.mean([row.output_tokens <= getattr(p, name) for row, p in zip(rows, predictions, strict=True)])
        for name in ("p50", "p90", "p99")
    }
    assert 0.40 <= below["p50"] <= 0.60
    assert 0.84 <= below["p90"] <= 0.96
    assert below["p99"] >= 0.965
    assert all(1 <= p.p50 <= p.p90 <= p.p99 <= 4096 for p in predictions)


def test_truncated_answers_count_as_longer_than_they_came(world: World) -> None:
    """Half of the long answers are cut at 500 tokens: taken as exact they would pull the prediction below 500."""
    data = world.dataset(500, max_tokens=500)
    assert 0.1 < data.truncated.mean() < 0.4
    model = train(data, version=1)
    naive = train(
        Dataset(
            data.compact,
            data.buckets,
            data.counts,
            data.offsets,
            data.output_tokens,
            data.max_tokens,
            np.zeros(len(data), np.bool_),
        ),
        version=1,
    )
    long_answers = [row for row in held_out(world) if row.output_tokens > 400]
    aware = np.mean([to_prediction(model.predict_log(row.vector), 4096).mean for row in long_answers])
    fooled = np.mean([to_prediction(naive.predict_log(row.vector), 4096).mean for row in long_answers])
    assert aware > 1.1 * fooled


def test_learns_from_answers_that_were_all_truncated(world: World) -> None:
    """A benchmark with ignore_eos: every answer is exactly max_tokens long."""
    data = world.dataset(200, max_tokens=2)
    assert data.truncated.all()
    model = train(data, version=1)
    prediction = to_prediction(model.predict_log(world.observation(2).vector), 2)
    assert prediction.p50 == pytest.approx(2, abs=0.3)


@pytest.mark.parametrize("rows", [2, 3, 7, 32])
def test_few_observations_still_give_a_sane_model(world: World, rows: int) -> None:
    model = train(world.dataset(rows), version=1)
    prediction = to_prediction(model.predict_log(world.observation().vector), 300)
    assert 1 <= prediction.p50 <= prediction.p90 <= prediction.p99 <= 300
    assert 1 <= prediction.mean <= 300


def test_equal_data_give_an_equal_model(world: World) -> None:
    data = world.dataset(64)
    first, second = train(data, version=3).to_arrays(), train(data, version=3).to_arrays()
    assert all(np.array_equal(first[name], second[name]) for name in first)


def test_one_observation_is_refused(world: World) -> None:
    with pytest.raises(ValueError, match="1 observations"):
        train(world.dataset(1), version=1)


def test_a_prediction_runs_a_few_lines_whatever_the_model_knows(model: LengthModel, world: World) -> None:
    """Trees are walked together, by numpy: only their depth costs Python a line."""
    little = train(world.dataset(64), version=1)
    deeper = model.forest.depth - little.forest.depth
    for row in held_out(world, 20):
        count = lines_run(lambda vector=row.vector: to_prediction(model.predict_log(vector), 4096))
        assert count <= 150
        least = lines_run(lambda vector=row.vector: to_prediction(little.predict_log(vector), 4096))
        assert count - least <= 20 * deeper


@pytest.mark.parametrize("max_tokens", [-5, 0, 1, 2, 100, 10**9])
def test_predictions_stay_within_one_and_max_tokens(model: LengthModel, world: World, max_tokens: int) -> None:
    for row in held_out(world, 20):
        for prediction in (
            to_prediction(model.predict_log(row.vector), max_tokens),
            default_prediction(256.0, max_tokens),
        ):
            limit = max(1, max_tokens)
            assert 1 <= prediction.mean <= limit
            assert 1 <= prediction.p50 <= prediction.p90 <= prediction.p99 <= limit


def test_extreme_scores_stay_finite() -> None:
    prediction = to_prediction(np.array([1e6, -1e6, 5.0, 4.0]), 2**62)
    assert [prediction.p50, prediction.p90, prediction.p99] == pytest.approx([1.0, 148.41, 148.41], abs=0.01)
    assert np.isfinite(prediction.mean)


def test_default_is_marked_as_such() -> None:
    assert default_prediction(256.0, 4096).source == "default"
    assert default_prediction(256.0, 4096).mean == 256.0


@pytest.mark.parametrize("limit", [1, 3, 10, 512, 1000, 8191])
def test_a_prediction_beyond_the_clients_limit_is_the_limit(limit: int) -> None:
    """Not the exponential of its logarithm, which is less: a response that is cut at the limit is covered."""
    found = to_prediction(np.array([np.log(limit) + 1.0] * 4), limit)
    assert (found.mean, found.p50, found.p90, found.p99) == (limit,) * 4
    assert to_prediction(np.array([0.0, 0.0, 1e9, -5.0]), limit).p99 == limit


def test_one_fold_of_many_chooses_the_strength_that_all_folds_would(make_world: Callable[[int], World]) -> None:
    data = make_world(5).dataset(3000)
    ngrams, target = training._ngram_matrix(data), np.log(data.output_tokens.astype(np.float64))
    centred = target - target.mean()

    def error(strength: float) -> float:
        _, scores = training._linear_stage(ngrams, target, strength)
        return float(np.mean((centred - scores) ** 2))

    assert training._strength(ngrams, target) == min(training._RIDGE_STRENGTHS, key=error)
