"""Waste of padding: of one batch, and expected over all buckets for the observed distribution of lengths, f(S).

Computed by `prefill_order.py` for its metrics. Real only on padded paths (`IterationPlan.padded_to`): on the
variable-length path, which computes no padding, it is what bucketing would save.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

_MEMORY = 16_384
"""Requests after which everything before counts half."""


class LengthHistogram:
    """Observed distribution of prompt lengths, which slowly forgets. Bins grow geometrically: a few hundred distinguish
    short requests and still reach the longest."""

    def __init__(self, max_tokens: int, bins: int = 256) -> None:
        # Upper edges are distinct whole tokens, so small tables have fewer than `bins`.
        edges = np.unique(np.ceil(np.geomspace(1.0, max(2, max_tokens), bins)).astype(np.int64))
        self._lower: list[int] = [0, *edges[:-1].tolist()]
        self._requests = [0.0] * len(edges)
        self._tokens = [0.0] * len(edges)
        self._total = 0.0

    def add(self, tokens: int) -> None:
        index = min(bisect_right(self._lower, tokens) - 1, len(self._lower) - 1)
        self._requests[index] += 1.0
        self._tokens[index] += tokens
        self._total += 1.0
        if self._total >= 2 * _MEMORY:
            self._requests = [value / 2 for value in self._requests]
            self._tokens = [value / 2 for value in self._tokens]
            self._total /= 2

    def lengths_and_weights(self) -> tuple[FloatArray, FloatArray]:
        """Return the mean length in tokens and the number of requests of every bin that has any."""
        weights, tokens = np.asarray(self._requests), np.asarray(self._tokens)
        occupied = weights > 0
        return tokens[occupied] / weights[occupied], weights[occupied]


def waste_ratio(lengths: Sequence[int]) -> float:
    """B2 · BucketServe Eq. 2: Return the share of a padded batch that is padding.

        (S_max − S_avg) / S_max

    `lengths` in tokens; 0 for an empty batch.
    """
    longest = max(lengths, default=0)
    return 0.0 if longest == 0 else 1.0 - sum(lengths) / (len(lengths) * longest)


def expected_waste(upper_bounds: Sequence[int], lengths: FloatArray, weights: FloatArray) -> float:
    """B2 · BucketServe Eq. 3: Return expected waste of a request when every bucket is padded to its upper bound.

        Σ_b ∫_{L_b}^{U_b} (1 − S/U_b) f(S) dS

    f(S) → the histogram: `weights[i]` requests of `lengths[i]` tokens, any scale. `upper_bounds` ascending, exclusive.
    Differs from the paper: the integral is a sum over the histogram; a request at or beyond the last bound belongs to
    the last bucket and wastes nothing (the paper leaves S ≥ L_max open).
    """
    total = float(weights.sum())
    if total <= 0.0 or not upper_bounds:
        return 0.0
    bounds = np.asarray(upper_bounds, dtype=np.float64)
    bucket = np.minimum(np.searchsorted(bounds, lengths, side="right"), len(bounds) - 1)
    wasted = np.maximum(0.0, 1.0 - lengths / bounds[bucket])
    return float(wasted @ weights) / total
