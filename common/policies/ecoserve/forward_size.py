"""E1 · The target forward size: tokens of one iteration from which on more of them no longer go faster.

Found by the scheduler from the iterations that it learns from, unless `engine.target_forward_tokens` says what it is;
`cohort profile` prints that of its measured iterations.
"""

from __future__ import annotations

from collections.abc import Iterable

from cohort.common.errors import ConfigError
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import StepTimes

_GRAIN = 64
"""Sizes that are compared: multiples of so many tokens."""


def target_forward_tokens(points: Iterable[tuple[int, float]], *, share: float = 0.9) -> int:
    """E1 · EcoServe §2.1 (TFS): the fewest tokens at which the device computes `share` of the most tokens a second it
    computes at any size.

    `points`: (tokens of an iteration, its seconds), of prefill iterations; of equal sizes the fastest counts. Raises
    `ConfigError` without a point. Differs from the paper: "the forward size that saturates GPU utilization" needs a
    threshold to be a number; nine tenths of the peak rate is ours.
    """
    fastest: dict[int, float] = {}
    for tokens, seconds in points:
        if tokens > 0 and seconds > 0:
            fastest[tokens] = max(fastest.get(tokens, 0.0), tokens / seconds)
    if not fastest:
        raise ConfigError("a target forward size needs at least one measured iteration")
    peak = max(fastest.values())
    return min(tokens for tokens, rate in fastest.items() if rate >= share * peak)


class LearnedForwardSize:
    """E1 · The target forward size by the learned price of an iteration; `most` tokens until there is one."""

    def __init__(self, most: int) -> None:
        self._most = self.tokens = most
        self._of: StepTimes | None = None

    def refresh(self, times: StepTimes | None) -> None:
        """After iterations were recorded. Prompts from position 0, as many as it takes; no decode beside them."""
        if times is None or times is self._of:
            return
        self._of = times
        sizes = [*range(_GRAIN, self._most, _GRAIN), self._most]
        shapes = [(size, BatchShape(size, 1, size * (size + 1) // 2, 0, 0)) for size in sizes]
        self.tokens = target_forward_tokens((size, step_seconds(times, shape)) for size, shape in shapes)
