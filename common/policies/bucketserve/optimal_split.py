"""The K bucket bounds with the least expected waste: an exact dynamic programme on Eq. 3.

Future work of BucketServe ("distribution-aware methods") and a yardstick for its bisection. Asked by
`prefill_order.py` now and then when the configuration chooses it. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cohort.common.policies.bucketserve.waste import FloatArray


def optimal_bounds(candidates: Sequence[int], lengths: FloatArray, weights: FloatArray, buckets: int) -> list[int]:
    """B5 beside Alg. 1 · the `buckets` upper bounds out of `candidates` that minimise Eq. 3 over a histogram.

    `candidates`: possible exclusive upper bounds, ascending; the last is always taken (L_max). A request of
    `lengths[i]` belongs to the first bound above it, `weights[i]` requests have that length.

        W[k][j] = min_{i<j} W[k−1][i] + Σ_{c_i ≤ S < c_j} f(S) · (1 − S/c_j)

    O(K·C²) over C candidates, vectorised over i. Replaces Eq. 4, whose condition has no solution (the mean of a
    bucket is never its upper bound). Returns at most `buckets` bounds: fewer when further ones save nothing.
    """
    bounds = np.asarray(candidates, dtype=np.float64)
    slots = len(bounds)
    home = np.minimum(np.searchsorted(bounds, lengths, side="right"), slots - 1)
    requests = np.concatenate([[0.0], np.cumsum(np.bincount(home, weights, slots))])
    tokens = np.concatenate([[0.0], np.cumsum(np.bincount(home, weights * np.minimum(lengths, bounds[home]), slots))])

    # best[j]: least waste of everything below candidate j-1, with the buckets used so far.
    best = np.full(slots + 1, np.inf)
    best[0] = 0.0
    chosen: list[np.ndarray] = []
    for _ in range(min(buckets, slots)):
        after = np.full(slots + 1, np.inf)
        origin = np.zeros(slots + 1, dtype=np.int64)
        for end in range(1, slots + 1):
            cost = best[:end] + (requests[end] - requests[:end]) - (tokens[end] - tokens[:end]) / bounds[end - 1]
            origin[end] = int(np.argmin(cost))
            after[end] = cost[origin[end]]
        chosen.append(origin)
        if after[slots] >= best[slots]:  # another bucket saves nothing
            chosen.pop()
            break
        best = after
    picked: list[int] = []
    end = slots
    for origin in reversed(chosen):
        picked.append(int(candidates[end - 1]))
        end = int(origin[end])
        if end == 0:
            break
    return picked[::-1]
