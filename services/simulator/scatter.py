"""How iterations scatter about the cost model: factors of their times, log-normal with mean 1.

The coefficient of variation is a live worker's, as `cohort profile` measured it; 0: every iteration takes what the
model says. A factor depends on the seed, the instance and the iteration's number alone, so that iterations which are
run ahead and those run one by one take the same. Asked by the engine; decides nothing.
"""

from __future__ import annotations

import math

import numpy as np

_LENGTH = 1 << 15
_STREAM = 0x5CA77E2
_APART = 9973
"""Places between the first factors of two instances; prime, as no period of a workload is."""


class StepScatter:
    def __init__(self, variation: float, seed: int) -> None:
        self._factors: list[float] = []
        if variation > 0.0:
            sigma = math.sqrt(math.log1p(variation * variation))
            sampled = np.random.default_rng([seed, _STREAM]).lognormal(-0.5 * sigma * sigma, sigma, _LENGTH)
            self._factors = sampled.tolist()

    def __bool__(self) -> bool:
        return bool(self._factors)

    def factor(self, instance: int, step: int) -> float:
        """Of the time of an instance's iteration of this number."""
        if not self._factors:
            return 1.0
        return self._factors[(step + _APART * instance) % _LENGTH]
