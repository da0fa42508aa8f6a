"""Corrects predicted lengths between trainings: adaptive conformal shifts of the quantiles.

Every finished request nudges each quantile: up by rate·q when the answer was longer than predicted, down by
rate·(1-q) when it was not. In balance exactly the share q of answers lies below, whatever the workload drifts to
(Gibbs and Candès, "Adaptive conformal inference under distribution shift", with log length as the scale). The mean
moves with the median: answers a third as long as the model says are known as such after some hundred requests.
Called by `service.py` on every observation; a new model starts from zero, its own shifts being fresh.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cohort.services.length_predictor.model import QUANTILES

_RATE = 0.02  # log tokens per observation: 50 surprises move a quantile by a factor of e
_LIMIT = 2.0  # never further than a factor of e² from what the training found


class OnlineCalibration:
    """Three running shifts in log space."""

    def __init__(self) -> None:
        self._levels = np.asarray(QUANTILES)
        self.shifts: NDArray[np.float64] = np.zeros(len(QUANTILES))

    def adjusted(self, log_lengths: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return [log mean, log median, other quantiles…], shifted."""
        adjusted = log_lengths.copy()
        adjusted[0] += self.shifts[0]
        adjusted[1:] += self.shifts
        return adjusted

    def observe(self, predicted: NDArray[np.float64], log_actual: float, log_limit: float) -> None:
        """Learn from one answer. `predicted` as returned by `adjusted`; `log_limit` is the log of the request's
        max_tokens.

        A quantile beyond max_tokens could not have been exceeded, so such a request says nothing about it. Below,
        the outcome is known even if the answer was cut off; choosing by the limit alone does not bias the choice.
        """
        quantiles = predicted[1:]
        step = np.where(log_actual > quantiles, self._levels, self._levels - 1.0)
        self.shifts = np.clip(self.shifts + _RATE * np.where(quantiles <= log_limit, step, 0.0), -_LIMIT, _LIMIT)
