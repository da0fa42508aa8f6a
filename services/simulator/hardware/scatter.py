"""How iterations scatter about the cost model: factors of their times, log-normal with mean 1.

The coefficients of variation are a live worker's, as `cohort profile` measured them; 0: every iteration takes what
the model says.

    decodes      of one coefficient. A share of the variance lasts: a machine shared with others is slow for a second
                 and fast for another, so that an iteration tells of the next ones, and whole responses are slow. That
                 part is an autoregressive sequence of first order, which forgets in `SCATTER_LASTS_STEPS` iterations
    prompts      what disturbs an iteration averages out while it runs, so the longer it takes the less it scatters:
                 with one over the root of its time. Each by itself: prompts are as long as what lasts

A factor depends on the seed, the instance, the number of the iteration and, with prompts, its time alone, so that
iterations which are run ahead and those run one by one take the same. Asked by the engine; decides nothing.
"""

from __future__ import annotations

import math
from itertools import accumulate

import numpy as np

from cohort.services.simulator.hardware.hardware import SCATTER_LASTS_STEPS

_LENGTH = 1 << 15
_STREAM = 0x5CA77E2
_APART = 9973
"""Places between the first factors of two instances; prime, as no period of a workload is."""


class StepScatter:
    def __init__(self, variation: float, seed: int, lasting: float = 0.0, prompts: float | None = None) -> None:
        """`lasting`: share of the variance that lasts, 0 to 1. `prompts`: coefficient of variation of an iteration with
        prompts that takes a second; None: they scatter as decodes do."""
        self._factors: list[float] = []
        self._own: list[float] = []
        self._variation, self._prompts = variation, prompts
        if variation > 0.0:
            sigma = _sigma(variation)
            random = np.random.default_rng([seed, _STREAM])
            own = random.standard_normal(_LENGTH)
            lasts = math.exp(-1.0 / SCATTER_LASTS_STEPS)
            fresh = random.standard_normal(_LENGTH)
            fresh[1:] *= math.sqrt(1.0 - lasts * lasts)
            slow = np.array(list(accumulate(fresh.tolist(), lambda before, new: lasts * before + new)))
            deviation = math.sqrt(1.0 - lasting) * own + math.sqrt(lasting) * slow
            self._factors = np.exp(sigma * deviation - 0.5 * sigma * sigma).tolist()
            self._own = own.tolist()

    def __bool__(self) -> bool:
        return bool(self._factors)

    def factor(self, instance: int, step: int, prompts_s: float = 0.0) -> float:
        """Return the factor of an instance's iteration of this number; `prompts_s`: its time, if it has prompts."""
        if not self._factors:
            return 1.0
        place = (step + _APART * instance) % _LENGTH
        if self._prompts is None or prompts_s <= 0.0:
            return self._factors[place]
        sigma = _sigma(min(self._variation, self._prompts / math.sqrt(prompts_s)))
        return math.exp(sigma * self._own[place] - 0.5 * sigma * sigma)


def _sigma(variation: float) -> float:
    """Return the deviation of the logarithm of a factor with this coefficient of variation."""
    return math.sqrt(math.log1p(variation * variation))
