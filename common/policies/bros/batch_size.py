"""How many requests an iteration may have (R6), as TCP finds its window: it grows until a deadline says stop."""

from __future__ import annotations


class AdaptiveBatchSize:
    """Starts at `first`, grows by `step` after every iteration that no real-time deadline cut short, up to `most`;
    back to `first` when one did."""

    def __init__(self, *, first: int, step: int, most: int) -> None:
        self._first = min(first, most)
        self._step = step
        self._most = most
        self.value = self._first
        self.backoffs = 0

    def repeated(self, iterations: int) -> None:
        """So many ran without a decision, and none left a request out."""
        self.value = min(self._most, self.value + iterations * self._step)

    def decided(self, *, cut_short: bool) -> None:
        """An iteration was packed; `cut_short`: a request was left out because its deadline would have been missed."""
        if cut_short:
            self.value = self._first
            self.backoffs += 1
        else:
            self.value = min(self._most, self.value + self._step)
