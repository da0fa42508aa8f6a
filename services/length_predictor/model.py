"""The length model as it serves: features in, mean and quantiles out. Immutable; replaced whole after a training.

    n-grams ──▶ linear score (ridge on log length) ──┐
    compact features ────────────────────────────────┴─▶ boosted trees ──▶ mean, p50, p90, p99 ──▶ + shifts, clipped

Trees predict in log space; each quantile is shifted by what held-out residuals demanded (split conformal), so that
about 90 % of the answers really are below p90. Called by `service.py`; fitted by `training.py`; never learns itself.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cohort.common.types import Prediction
from cohort.services.length_predictor.features import COMPACT, HASH_DIMS, FeatureVector, ngram_weights

QUANTILES = (0.5, 0.9, 0.99)
_LOG_LARGEST = math.log(1e9)  # no answer is longer; also keeps exp() finite

Arrays = dict[str, NDArray[np.generic]]


@dataclass(frozen=True, slots=True)
class Forest:
    """Several ensembles ("outputs") over the same features: what scikit-learn fits, as flat arrays. Its own `predict`
    takes about a millisecond per model and row; here one NumPy step per level walks all trees of all models.

    Node i of a tree goes to `left[i]` if `features[feature[i]] <= threshold[i]`, else to `right[i]`; a leaf points
    to itself and holds `value[i]`. `roots[k]` starts tree k, which adds to output `output[k]`; `base` is each
    output's constant. `depth` levels reach every leaf.
    """

    feature: NDArray[np.int32]
    threshold: NDArray[np.float64]
    left: NDArray[np.int32]
    right: NDArray[np.int32]
    value: NDArray[np.float64]
    roots: NDArray[np.int32]
    output: NDArray[np.int32]
    base: NDArray[np.float64]
    depth: int

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]], depth: int) -> Forest:
        """Make a forest from arrays of any width. Raises `KeyError` if one is missing."""
        columns: dict[str, Any] = {
            name: arrays[name].astype(np.float64 if name in ("threshold", "value", "base") else np.int32)
            for name in cls.__dataclass_fields__
            if name != "depth"
        }
        return cls(**columns, depth=depth)

    def evaluate(self, row: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the raw score of every output for one row."""
        node = self.roots
        for _ in range(self.depth):
            goes_left = row[self.feature[node]] <= self.threshold[node]
            node = np.where(goes_left, self.left[node], self.right[node])
        return self.base + np.bincount(self.output, weights=self.value[node], minlength=len(self.base))

    def check(self) -> None:
        """Raise `ValueError` if the arrays cannot be a forest; for state that comes from a file."""
        nodes = len(self.feature)
        if not all(len(a) == nodes for a in (self.threshold, self.left, self.right, self.value)):
            raise ValueError("node arrays differ in length")
        if len(self.roots) != len(self.output) or not 0 <= self.depth <= 64 or not np.isfinite(self.base).all():
            raise ValueError("trees do not fit the outputs")
        for name, array, limit in (
            ("left", self.left, nodes),
            ("right", self.right, nodes),
            ("roots", self.roots, nodes),
            ("output", self.output, len(self.base)),
        ):
            if array.size and not (array.min() >= 0 and array.max() < limit):
                raise ValueError(f"{name} points outside")
        if self.feature.size and self.feature.min() < 0:
            raise ValueError("negative feature index")
        if not np.isfinite(self.value).all():
            raise ValueError("leaf values are not finite")


@dataclass(frozen=True, slots=True)
class LengthModel:
    """`weights` score the n-grams; `forest` has outputs [log mean, log p50, log p90, log p99]; `shifts` calibrate the
    quantiles. `trained_on` observations, `version` counts trainings."""

    weights: NDArray[np.float64]
    forest: Forest
    shifts: NDArray[np.float64]
    trained_on: int
    version: int

    def predict_log(self, vector: FeatureVector) -> NDArray[np.float64]:
        """[log mean, log p50, log p90, log p99], quantiles shifted, not yet ordered or clipped."""
        raw = self.forest.evaluate(np.append(vector.compact, self.score(vector)))
        raw[1:] += self.shifts
        return raw

    def score(self, vector: FeatureVector) -> np.float32:
        """Return the linear stage: how much longer (in log tokens) than average the answers to these n-grams are."""
        return np.float32(self.weights[vector.buckets] @ ngram_weights(vector.counts))

    def to_arrays(self) -> Arrays:
        """Return plain arrays for an npz file or a pipe."""
        forest = {f"forest_{f.name}": np.asarray(getattr(self.forest, f.name)) for f in fields(Forest)}
        return {
            "weights": self.weights,
            "shifts": self.shifts,
            "trained_on": np.asarray(self.trained_on),
            "version": np.asarray(self.version),
            **forest,
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[np.generic]]) -> LengthModel:
        """Restore a model. Raises `ValueError` or `KeyError` if the arrays cannot be one."""
        trees = {name.removeprefix("forest_"): array for name, array in arrays.items()}
        forest = Forest.of(trees, int(arrays["forest_depth"].item()))
        model = cls(
            arrays["weights"].astype(np.float64),
            forest,
            arrays["shifts"].astype(np.float64),
            int(arrays["trained_on"].item()),
            int(arrays["version"].item()),
        )
        model.check()
        return model

    def check(self) -> None:
        self.forest.check()
        if self.weights.shape != (HASH_DIMS,) or not np.isfinite(self.weights).all():
            raise ValueError("weights do not fit the n-gram table")
        if self.shifts.shape != (len(QUANTILES),) or not np.isfinite(self.shifts).all():
            raise ValueError("shifts do not fit the quantiles")
        if len(self.forest.base) != 1 + len(QUANTILES):
            raise ValueError("forest has the wrong outputs")
        if self.forest.feature.size and self.forest.feature.max() > len(COMPACT):
            raise ValueError("forest reads features that do not exist")


def to_prediction(log_lengths: NDArray[np.float64], max_tokens: int) -> Prediction:
    """Convert log lengths: quantiles ordered, everything within [1, max_tokens]."""
    most = float(max(1, max_tokens))
    limit = math.log(most)
    lengths = np.exp(np.clip(log_lengths, 0.0, min(limit, _LOG_LARGEST)))
    lengths[log_lengths >= limit] = most  # exp(log(512)) is less than 512
    mean, *quantiles = np.minimum(lengths, most)
    p50, p90, p99 = np.maximum.accumulate(quantiles)
    return Prediction(float(mean), float(p50), float(p90), float(p99), "model")


def default_prediction(mean_tokens: float, max_tokens: int) -> Prediction:
    """Predict before anything was learned: a log-normal of the configured mean and σ = 1, as in chat traffic."""
    median = mean_tokens * math.exp(-0.5)
    limit = float(max(1, max_tokens))
    p50, p90, p99 = (min(max(1.0, median * math.exp(z)), limit) for z in (0.0, 1.2816, 2.3263))
    return Prediction(min(max(1.0, mean_tokens), limit), p50, p90, p99, "default")
