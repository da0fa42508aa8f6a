"""E4 · How much longer than predicted a decode is allocated, learned from ended decodes. Owned by `TimeSynced`."""

from __future__ import annotations


class PaddingRatio:
    """E4 · EcoServe §2.3: predicted lengths are padded by a ratio between waiting (too much padding, idle KV) and
    stopping (too little).

    A decode that was allocated too much costs 1, one that stopped because it outlived its allocation `under_cost`, one
    that continued with the reserve nothing. Each ended decode moves the ratio a step against its cost (a newsvendor's
    optimum); the paper sweeps it by hand per data set (10, 15, 20 %). `tuned` False: the ratio is fixed.
    """

    LARGEST = 2.0

    def __init__(self, start: float, *, tuned: bool, under_cost: float = 3.0, step: float = 0.004) -> None:
        self.ratio = start
        self.over = self.under = 0
        self._tuned, self._under_cost, self._step = tuned, under_cost, step

    def observe(self, predicted: float, output_tokens: int, *, stopped: bool) -> None:
        """Learn from an ended decode of `output_tokens`, with the prediction before padding; `stopped`: it had to wait
        in the middle."""
        under = output_tokens > predicted * (1.0 + self.ratio)
        self.under += under
        self.over += not under
        if self._tuned:
            move = self._step * self._under_cost if stopped else 0.0 if under else -self._step
            self.ratio = min(self.LARGEST, max(0.0, self.ratio + move))
