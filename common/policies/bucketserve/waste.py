"""Waste of padding: of one batch, and expected over all buckets.

Pure arithmetic over lengths, asked by the bucket manager for its metrics and by the splitters for what they minimise.
Real only on padded paths (`IterationPlan.padded_to`): the variable-length path computes no padding, there the figures
say what bucketing would save.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


def waste_ratio(lengths: Sequence[int]) -> float:
    """B2 · BucketServe Eq. 2: the share of a padded batch that is padding.

        (S_max − S_avg) / S_max

    `lengths` in tokens; 0 for an empty batch. Differs from the paper: no.
    """
    longest = max(lengths, default=0)
    return 0.0 if longest == 0 else 1.0 - sum(lengths) / (len(lengths) * longest)


def expected_waste(upper_bounds: Sequence[int], lengths: FloatArray, weights: FloatArray) -> float:
    """B2 · BucketServe Eq. 3: expected waste of a request when every bucket is padded to its upper bound.

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
