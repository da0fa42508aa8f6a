"""E4 · How much longer than predicted an answer is allocated: a ratio that learns from answers that have ended.

Owned by `TimeSynced`. Decides nothing about single requests.
"""

from __future__ import annotations


class PaddingRatio:
    """E4 · EcoServe §2.3: predicted lengths are padded by a ratio with a sweet spot between waiting (padded too much,
    KV stands idle) and stopping (padded too little).

    The sweet spot is found as a newsvendor's: a token that was allocated and not needed costs 1, one that was needed
    and not allocated costs `under_cost`. Each ended answer moves the ratio a step against the gradient of that cost,
    in relative terms; at rest, one answer in (1 + under_cost) outlives its allocation. The paper prints 70 to 78 % of
    answers within their padded prediction at its sweet spots: an `under_cost` near 3.

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

    def observe(self, predicted: float, output_tokens: int) -> None:
        """An answer of `output_tokens` ended, for which `predicted` were expected before padding."""
        if output_tokens > predicted * (1.0 + self.ratio):
            self.under += 1
            move = self._step * self._under_cost
        else:
            self.over += 1
            move = -self._step
        if self._tuned:
            self.ratio = min(self.LARGEST, max(0.0, self.ratio + move))
