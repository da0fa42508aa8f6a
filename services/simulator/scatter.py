"""How iterations scatter about the cost model: factors of their times, log-normal with mean 1.

The coefficient of variation is a live worker's, as `cohort profile` measured it; 0: every iteration takes what the
model says. A share of the variance lasts: a machine shared with others is slow for a second and fast for another, so
that an iteration tells of the next ones, and whole responses are slow. That part is an autoregressive sequence of
first order, which forgets in `SCATTER_LASTS_STEPS` iterations. A factor depends on the seed, the instance and the
number of the iteration alone, so that iterations which are run ahead and those run one by one take the same. Asked by
the engine; decides nothing.
"""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np

from cohort.services.simulator.hardware import SCATTER_LASTS_STEPS

_LENGTH = 1 << 15
_STREAM = 0x5CA77E2
_APART = 9973
"""Places between the first factors of two instances; prime, as no period of a workload is."""


class StepScatter:
    def __init__(self, variation: float, seed: int, lasting: float = 0.0) -> None:
        """`lasting`: share of the variance that lasts, 0 to 1."""
        self._factors: list[float] = []
        if variation > 0.0:
            sigma = math.sqrt(math.log1p(variation * variation))
            random = np.random.default_rng([seed, _STREAM])
            own = random.standard_normal(_LENGTH)
            kept = math.exp(-1.0 / SCATTER_LASTS_STEPS)
            news = random.standard_normal(_LENGTH)
            news[1:] *= math.sqrt(1.0 - kept * kept)
            slow = np.array(list(accumulate(news.tolist(), lambda before, new: kept * before + new)))
            deviation = math.sqrt(1.0 - lasting) * own + math.sqrt(lasting) * slow
            self._factors = np.exp(sigma * deviation - 0.5 * sigma * sigma).tolist()

    def __bool__(self) -> bool:
        return bool(self._factors)

    def factor(self, instance: int, step: int) -> float:
        """Of the time of an instance's iteration of this number."""
        if not self._factors:
            return 1.0
        return self._factors[(step + _APART * instance) % _LENGTH]
