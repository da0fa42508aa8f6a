"""Fits a length model to finished requests. Pure: same data and version, same model. The only scikit-learn here.

Called by `trainer_process.py`, in its own process; never by the process that serves predictions.

    1. Linear stage: ridge regression of log length on hashed n-grams, strength chosen once by cross-validation, where
       requests are many by one fold alone. The trees learn from its *out-of-fold* scores, else they would trust
       scores that had seen the answer.
    2. Answers cut off at max_tokens are replaced by a draw from what such requests go on to (Buckley and James,
       "Linear regression with censored data"): residuals of other requests beyond the cut.
    3. Boosted trees on compact features + score: gamma deviance for the mean, pinball loss for each quantile.
    4. Split conformal: every fifth row is kept from the trees; its residuals shift each quantile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.linalg import lsqr
from sklearn.ensemble import HistGradientBoostingRegressor
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from cohort.services.length_predictor.buffer import Dataset
from cohort.services.length_predictor.features import HASH_DIMS, ngram_weights
from cohort.services.length_predictor.model import QUANTILES, Forest, LengthModel

_FOLDS = 5
_RIDGE_STRENGTHS = (0.3, 1.0, 3.0, 10.0)
_MANY = 2000
"""Number of requests from which one fold is enough to compare strengths: all folds would be most of a training."""
_HELD_OUT_EVERY = 5
_TREES = 60
_LEARNING_RATE = 0.08
_LEAVES = 12
_MAX_DEPTH = 6
_IMPUTATIONS = 2

Floats = NDArray[np.float64]


def train(data: Dataset, version: int) -> LengthModel:
    """Train on at least two observations; a model of a few dozen is worth something.

    On one thread: the problem is small, and threads that wait for each other on busy cores take a hundred times longer.
    """
    if len(data) < 2:
        raise ValueError(f"cannot learn from {len(data)} observations")
    with threadpool_limits(limits=1):
        return _train(data, version)


def _train(data: Dataset, version: int) -> LengthModel:
    random = np.random.default_rng(version)
    ngrams = _ngram_matrix(data)
    log_length = np.log(data.output_tokens.astype(np.float64))
    strength = _strength(ngrams, log_length)
    weights, score = _linear_stage(ngrams, log_length, strength)
    rows = np.column_stack([data.compact, score]).astype(np.float32)
    if data.truncated.any():
        for _ in range(_IMPUTATIONS):
            log_length = _impute(data, rows, log_length, random)
            weights, score = _linear_stage(ngrams, log_length, strength)
            rows[:, -1] = score
    held_out = np.arange(len(data)) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
    forest = _fit_forest(rows[~held_out], log_length[~held_out])
    shifts = _conformal_shifts(forest, rows[held_out], data, held_out)
    model = LengthModel(weights, forest, shifts, trained_on=len(data), version=version)
    model.check()
    return model


def _ngram_matrix(data: Dataset) -> Any:
    bags = [ngram_weights(data.counts[data.offsets[i] : data.offsets[i + 1]]) for i in range(len(data))]
    values = np.concatenate(bags) if bags else np.zeros(0)
    return csr_matrix((values, data.buckets.astype(np.int32), data.offsets), shape=(len(data), HASH_DIMS))


def _strength(ngrams: Any, log_length: Floats) -> float:
    """Choose the strength whose fits predict unseen rows best."""
    centred = log_length - log_length.mean()
    folds = _folds(len(centred))
    judged = range(1 if len(centred) > _MANY else folds.max() + 1)

    def error(strength: float) -> float:
        wrong = [centred[folds == fold] - _unseen(ngrams, centred, folds == fold, strength) for fold in judged]
        return float(np.mean(np.concatenate(wrong) ** 2))

    return min(_RIDGE_STRENGTHS, key=error)


def _linear_stage(ngrams: Any, log_length: Floats, strength: float) -> tuple[Floats, Floats]:
    """Return weights fitted to all rows, and each row's score from a fit that has not seen it."""
    centred = log_length - log_length.mean()
    folds, scores = _folds(len(centred)), np.zeros(len(centred))
    for fold in range(folds.max() + 1):
        scores[folds == fold] = _unseen(ngrams, centred, folds == fold, strength)
    return _ridge(ngrams, centred, strength), scores


def _folds(rows: int) -> NDArray[np.int64]:
    """Return the fold of each row."""
    return np.arange(rows) % min(_FOLDS, rows)


def _unseen(ngrams: Any, target: Floats, unseen: NDArray[np.bool_], strength: float) -> Floats:
    """Return scores of these rows from a fit to the others."""
    scores: Floats = ngrams[unseen] @ _ridge(ngrams[~unseen], target[~unseen], strength)
    return scores


def _ridge(ngrams: Any, target: Floats, strength: float) -> Floats:
    solution: Floats = lsqr(ngrams, target, damp=strength**0.5, iter_lim=40)[0]
    return np.nan_to_num(solution)


def _impute(data: Dataset, rows: NDArray[np.float32], log_length: Floats, random: np.random.Generator) -> Floats:
    """Replace truncated log lengths by likely longer ones."""
    expected = _boosted("squared_error").fit(rows, log_length).predict(rows)
    residuals = np.sort(log_length - expected)
    spread = float(residuals.std()) or 0.1
    floor = np.log(data.output_tokens.astype(np.float64))
    imputed = floor.copy()
    for i in np.flatnonzero(data.truncated):
        first_beyond = int(np.searchsorted(residuals, floor[i] - expected[i], side="right"))
        if first_beyond < len(residuals):
            imputed[i] = expected[i] + residuals[random.integers(first_beyond, len(residuals))]
        else:
            imputed[i] = floor[i] + abs(random.normal(0.0, spread))
    return imputed


def _boosted(loss: str, quantile: float | None = None) -> Any:
    return HistGradientBoostingRegressor(
        loss=loss,
        quantile=quantile,
        max_iter=_TREES,
        learning_rate=_LEARNING_RATE,
        max_leaf_nodes=_LEAVES,
        max_depth=_MAX_DEPTH,
        min_samples_leaf=10,
        l2_regularization=1.0,
        early_stopping=False,
        random_state=0,
    )


def _fit_forest(rows: NDArray[np.float32], log_length: Floats) -> Forest:
    fitted = [_boosted("gamma").fit(rows, np.exp(log_length))]
    fitted += [_boosted("quantile", q).fit(rows, log_length) for q in QUANTILES]
    forest = _flatten(fitted)
    _compare(forest, fitted, rows[:: max(1, len(rows) // 8)])
    return forest


def _flatten(fitted: list[Any]) -> Forest:
    """Join the trees, which scikit-learn keeps as record arrays; leaves point to themselves."""
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in ("feature", "threshold", "left", "right", "value")}
    roots, output, size, depth = [], [], 0, 0
    for index, model in enumerate(fitted):
        for iteration in model._predictors:
            nodes = iteration[0].nodes
            itself = np.arange(len(nodes)) + size
            leaf = nodes["is_leaf"].astype(bool)
            columns["feature"].append(np.where(leaf, 0, nodes["feature_idx"]))
            columns["threshold"].append(np.where(leaf, 0.0, nodes["num_threshold"]))
            columns["left"].append(np.where(leaf, itself, nodes["left"].astype(np.int64) + size))
            columns["right"].append(np.where(leaf, itself, nodes["right"].astype(np.int64) + size))
            columns["value"].append(np.where(leaf, nodes["value"], 0.0))
            roots.append(size)
            output.append(index)
            size += len(nodes)
            depth = max(depth, int(nodes["depth"].max()))
    base = np.asarray([model._baseline_prediction.item() for model in fitted])
    trees = {"roots": np.asarray(roots), "output": np.asarray(output), "base": base}
    return Forest.of(trees | {name: np.concatenate(parts) for name, parts in columns.items()}, depth)


def _compare(forest: Forest, fitted: list[Any], rows: NDArray[np.float32]) -> None:
    """Raise `ValueError` if the flat form predicts otherwise than scikit-learn, whose record arrays may change."""
    for row in rows:
        ours = forest.evaluate(row)
        theirs = np.asarray([model.predict(row[None])[0] for model in fitted])
        theirs[0] = np.log(theirs[0])
        if not np.allclose(ours, theirs, rtol=1e-5, atol=1e-5):
            raise ValueError("this scikit-learn lays its trees out differently; the model was not taken over")


def _conformal_shifts(forest: Forest, rows: NDArray[np.float32], data: Dataset, held_out: NDArray[np.bool_]) -> Floats:
    """Return per quantile the shift under which held-out answers lie below it as often as they should. Only requests
    that could have exceeded the quantile count (max_tokens above it): their outcome is known even if they were cut off,
    and the choice does not depend on it."""
    log_length = np.log(data.output_tokens[held_out].astype(np.float64))
    log_limit = np.log(np.maximum(1, data.max_tokens[held_out]).astype(np.float64))
    shifts = np.zeros(len(QUANTILES))
    if not len(rows):
        return shifts
    predicted = np.stack([forest.evaluate(row) for row in rows])[:, 1:]
    for k, level in enumerate(QUANTILES):
        known = predicted[:, k] <= log_limit
        residuals = np.sort(log_length[known] - predicted[known, k])
        if len(residuals) >= 5:
            rank = min(len(residuals), int(np.ceil((len(residuals) + 1) * level)))
            shifts[k] = residuals[rank - 1]
    return shifts
