"""How many requests an iteration may have (R6), found as TCP finds its window."""

from __future__ import annotations


class AdaptiveBatchSize:
    """Size that starts at `first`, grows by `step` after every iteration that no real-time deadline cut short, up to
    `most`, and returns to `first` when one did."""

    def __init__(self, *, first: int, step: int, most: int) -> None:
        self._first = min(first, most)
        self._step = step
        self._most = most
        self.value = self._first
        self.backoffs = 0

    def repeated(self, iterations: int) -> None:
        """Grow for `iterations` that ran without a decision: none left a request out."""
        self.value = min(self._most, self.value + iterations * self._step)

    def decided(self, *, cut_short: bool) -> None:
        """Update after a decision; `cut_short`: a deadline left a request out."""
        if cut_short:
            self.value = self._first
            self.backoffs += 1
        else:
            self.value = min(self._most, self.value + self._step)
