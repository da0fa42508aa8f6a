"""E4 · How much longer than predicted a decode is allocated: a ratio that learns from decodes that have ended.

Owned by `TimeSynced`. Decides nothing about single requests.
"""

from __future__ import annotations


class PaddingRatio:
    """E4 · EcoServe §2.3: predicted lengths are padded by a ratio between waiting (too much padding, idle KV) and
    stopping (too little).

    The ratio is found as a newsvendor's: a decode that was allocated too much costs 1, one that stopped because it
    outlived its allocation costs `under_cost`, one that continued with the reserve costs nothing. Each ended decode
    moves the ratio a step against its cost, towards `under_cost` times as many decodes with too much as stopped ones;
    where stops are rare, that is no padding.

    Differs from the paper: there the ratio is swept by hand per data set (10, 15, 20 %). `tuned` False: it is fixed.
    """

    LARGEST = 2.0

    def __init__(self, start: float, *, tuned: bool, under_cost: float = 3.0, step: float = 0.004) -> None:
        self.ratio = start
        self.over = 0
        self.under = 0
        self._tuned = tuned
        self._under_cost = under_cost
        self._step = step

    def observe(self, predicted: float, output_tokens: int, *, stopped: bool) -> None:
        """Learn from an ended decode of `output_tokens`, with the prediction before padding; `stopped`: it had to wait
        in the middle."""
        move = 0.0
        if output_tokens > predicted * (1.0 + self.ratio):
            self.under += 1
        else:
            self.over += 1
            move -= self._step
        if stopped:
            move = self._step * self._under_cost
        if self._tuned:
            self.ratio = min(self.LARGEST, max(0.0, self.ratio + move))
