"""How many iterations a newcomer waits for cache blocks, if every response ends where it is predicted.

    decode rows, by what they still sample ─▶ the most that they will hold together, from now on and from every end on
    what those before a newcomer need, and its own ─▶ the first end after which that fits beside the others

The placement's forecast of `kv_forecast`, by which the worker admits prompts; in positions, so half a block is added
per row. Pure arithmetic, made once per report of a worker that may be short of blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

_UNFILLED = 8
"""Unfilled positions in a row's last block, on average."""


class BlockWait:
    def __init__(self, rows: Iterable[tuple[int, int]], held: int, total: int) -> None:
        """`rows`: (tokens still to sample, positions held) of every decode row that keeps its blocks. `held`: positions
        of prompts being computed. `total`: positions of the cache."""
        by_end = sorted(rows)
        self._free = max(1, total - held)
        self._ends = [remaining for remaining, _ in by_end]
        peaks, then = [0], 0  # the most held from each end on: a row holds most just before it ends, and all grow alike
        for count, (remaining, own) in enumerate(reversed(by_end), start=1):
            then += own + _UNFILLED
            peaks.append(max(peaks[-1], then + count * remaining))
        self._negative = [-peak for peak in reversed(peaks)]
        self._residence = 2.0 * sum(self._ends) / max(1, len(by_end))
        self.turnover = self._free / max(1.0, self._residence)
        """Positions that come free in an iteration while the cache is full."""

    def iterations(self, needed: float) -> float:
        """Return the iterations until `needed` positions fit. Each further cacheful waits as long as a response."""
        at = bisect_left(self._negative, needed - self._free)
        if at == 0:
            return 0.0
        if at < len(self._negative):
            return float(self._ends[at - 1])
        return (self._ends[-1] if self._ends else 0.0) + (needed / self._free - 1.0) * self._residence
