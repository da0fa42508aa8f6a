"""A second prediction once the prompt is computed: from the model's own last hidden state, learned while serving.

    base prediction (prompt features) ─┐
    hidden state of the last position ─┴─▶ linear regression on log length, one recursive step per finished request

The state says much about how the model means to go on; one dot product reads it. Owned by `service.py`; used only
while its errors, counted before it learns from them, are smaller than those of the base prediction. Never blocks: an
update is a rank-one step over at most 258 numbers.
"""

from __future__ import annotations

import io
import math
import zipfile
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cohort.common.keys.private_files import private_folder, write_private
from cohort.services.length_predictor.calibration import OnlineCalibration
from cohort.services.length_predictor.model import QUANTILES

Floats = NDArray[np.float64]

_LARGEST_PROJECTION = 256
_NOISE = 0.3  # variance of log length that no state explains
_EXPLAINED = 0.5  # variance the state may explain before anything was seen
_FORGETTING = 0.9998  # about the last 5,000 requests
_MOST_SHIFT = 2.0  # a state moves the prediction by a factor of e² at most
_MEMORY = 0.99  # moving averages of the errors
_NEEDED = 64  # finished requests before it may speak
_MARGIN = 0.97  # and its error must be this much of the base's
_NORMAL_QUANTILES = np.array([0.0, 1.2816, 2.3263])


class Refiner:
    """Recursive least squares (Plackett 1950) with forgetting; state of a few hundred kilobytes at most."""

    def __init__(self, hidden_size: int) -> None:
        self.hidden_size = hidden_size
        self._projected = min(hidden_size, _LARGEST_PROJECTION)
        # A random projection keeps distances (Johnson and Lindenstrauss); the same for every start.
        self._projection: Floats | None = None
        if self._projected < hidden_size:
            drawn = np.random.default_rng(hidden_size).normal(size=(hidden_size, self._projected))
            self._projection = drawn / math.sqrt(self._projected) * math.sqrt(self._projected / hidden_size)
        size = self._projected + 2
        self._weights = np.zeros(size)
        self._weights[1] = 1.0  # at first the base prediction itself
        self._covariance = np.diag(np.array([0.1, 0.05] + [_EXPLAINED / self._projected] * self._projected))
        self._trace = float(np.trace(self._covariance))
        self._calibration = OnlineCalibration()
        self.learned = 0
        self.base_error = math.nan
        """Moving average of |log predicted − log real|."""
        self.refined_error = math.nan
        self._variance = _NOISE

    @property
    def better(self) -> bool:
        """Whether its predictions are better than the base's."""
        return self.learned >= _NEEDED and self.refined_error < _MARGIN * self.base_error

    def predict_log(self, base_log_mean: float, hidden: Floats) -> Floats:
        """[log mean, log p50, log p90, log p99]; not yet clipped to max_tokens."""
        mean = self._log_length(self._row(base_log_mean, hidden), base_log_mean)
        return self._with_quantiles(mean)

    def learn(self, base_log_mean: float, hidden: Floats, output_tokens: int, max_tokens: int, truncated: bool) -> None:
        """Learn from a finished request; from a truncated answer only if it was predicted to be shorter."""
        row = self._row(base_log_mean, hidden)
        predicted = self._log_length(row, base_log_mean)
        real = math.log(max(1, output_tokens))
        if truncated and predicted >= real:
            return
        self.base_error = _average(self.base_error, abs(base_log_mean - real))
        self.refined_error = _average(self.refined_error, abs(predicted - real))
        self._variance = _average(self._variance, (predicted - real) ** 2)
        self._calibration.observe(self._with_quantiles(predicted), real, math.log(max(1, max_tokens)))
        self.learned += 1
        # P ← (P − P x xᵀ P / (λ r + xᵀ P x)) / λ;  w ← w + k · error
        towards = self._covariance @ row
        gain = towards / (_FORGETTING * _NOISE + float(row @ towards))
        self._weights += gain * (real - float(self._weights @ row))
        self._covariance = (self._covariance - np.outer(gain, towards)) / _FORGETTING
        # Directions without data would grow without bound by the forgetting alone.
        trace = float(np.trace(self._covariance))
        if trace > self._trace:
            self._covariance *= self._trace / trace

    def _row(self, base_log_mean: float, hidden: Floats) -> Floats:
        scale = math.sqrt(float(hidden @ hidden) / len(hidden)) or 1.0
        state = hidden / scale if self._projection is None else (hidden / scale) @ self._projection
        return np.concatenate([[1.0, base_log_mean], state])

    def _log_length(self, row: Floats, base_log_mean: float) -> float:
        shift = float(self._weights @ row) - base_log_mean
        return base_log_mean + min(max(shift, -_MOST_SHIFT), _MOST_SHIFT)

    def _with_quantiles(self, mean: float) -> Floats:
        spread = math.sqrt(self._variance)
        found = self._calibration.adjusted(np.concatenate([[mean], mean + spread * _NORMAL_QUANTILES]))
        found[0] = mean  # the weights learn it
        return found

    # -- on disk -----------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Save atomically. Raises `OSError`."""
        stream = io.BytesIO()
        np.savez(
            stream,
            hidden_size=self.hidden_size,
            weights=self._weights,
            covariance=self._covariance,
            shifts=self._calibration.shifts,
            figures=np.array([self.learned, self.base_error, self.refined_error, self._variance]),
        )
        private_folder(path.parent)
        write_private(path, stream.getvalue())

    @classmethod
    def load(cls, path: Path, hidden_size: int) -> Refiner:
        """Load the refiner for this width of state; a fresh one if there is none or it cannot be read."""
        refiner = cls(hidden_size)
        try:
            with np.load(path, allow_pickle=False) as saved:
                if int(saved["hidden_size"]) != hidden_size:
                    return refiner
                weights, covariance = saved["weights"], saved["covariance"]
                shifts, figures = saved["shifts"], saved["figures"]
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
            return refiner
        size = len(refiner._weights)
        shapes = weights.shape == (size,) and covariance.shape == (size, size) and shifts.shape == (len(QUANTILES),)
        if shapes and figures.shape == (4,) and all(np.isfinite(a).all() for a in (weights, covariance, shifts)):
            refiner._weights, refiner._covariance = weights, covariance
            refiner._calibration.shifts = shifts
            refiner.learned = int(figures[0])
            refiner.base_error, refiner.refined_error, refiner._variance = (float(f) for f in figures[1:])
        return refiner


def _average(old: float, new: float) -> float:
    return new if math.isnan(old) else _MEMORY * old + (1.0 - _MEMORY) * new
