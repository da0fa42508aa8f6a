"""The observed distribution of lengths, f(S): a histogram that slowly forgets.

Filled by `prefill_order.py` with every arrival; read for the metric of Eq. 3 and by the optimal splitter. Bins grow
geometrically, so that a few hundred tell short requests apart and still reach the longest.
"""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from cohort.common.policies.bucketserve.waste import FloatArray

_MEMORY = 16_384
"""Requests after which everything before counts half."""


class LengthHistogram:
    def __init__(self, max_tokens: int, bins: int = 256) -> None:
        """Upper edges are distinct whole tokens up to `max_tokens`, so small tables have fewer than `bins`."""
        edges = np.unique(np.ceil(np.geomspace(1.0, max(2, max_tokens), bins)).astype(np.int64))
        self.edges: list[int] = edges.tolist()
        self._lower: list[int] = [0, *self.edges[:-1]]
        self._requests = [0.0] * len(self.edges)
        self._tokens = [0.0] * len(self.edges)
        self._total = 0.0

    def add(self, tokens: int) -> None:
        index = min(bisect_right(self._lower, tokens) - 1, len(self.edges) - 1)
        self._requests[index] += 1.0
        self._tokens[index] += tokens
        self._total += 1.0
        if self._total >= 2 * _MEMORY:
            self._requests = [value / 2 for value in self._requests]
            self._tokens = [value / 2 for value in self._tokens]
            self._total /= 2

    def __len__(self) -> int:
        return int(self._total)

    def lengths_and_weights(self) -> tuple[FloatArray, FloatArray]:
        """Mean length in tokens and number of requests of every bin that has any."""
        weights, tokens = np.asarray(self._requests), np.asarray(self._tokens)
        occupied = weights > 0
        return tokens[occupied] / weights[occupied], weights[occupied]
