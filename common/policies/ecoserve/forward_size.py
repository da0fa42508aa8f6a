"""E1 · The target forward size: tokens of one iteration beyond which the rate no longer grows.

The scheduler finds it in learned iteration times unless `engine.target_forward_tokens` is set; `cohort profile` prints
that of its measured iterations.
"""

from __future__ import annotations

from collections.abc import Iterable

from cohort.common.errors import ConfigError
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import StepTimes

_GRAIN = 64
"""Step in tokens between the sizes that are compared."""


def target_forward_tokens(points: Iterable[tuple[int, float]], *, share: float = 0.9) -> int:
    """E1 · EcoServe §2.1 (TFS): Return the fewest tokens at which the device reaches `share` of its peak token rate.

    `points`: (tokens of an iteration, its seconds), of prefill iterations; of equal sizes the fastest counts. Raises
    `ConfigError` without a point. The paper's "forward size that saturates GPU utilization" needs a threshold: nine
    tenths of the peak rate is ours.
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
    """E1 · The target forward size by learned iteration times; `most` tokens until there are any."""

    def __init__(self, most: int) -> None:
        self._most = self.tokens = most
        self._of: StepTimes | None = None

    def refresh(self, times: StepTimes | None) -> None:
        """Update the size after iterations were recorded, for prompts from position 0 without decodes."""
        if times is None or times is self._of:
            return
        self._of = times
        sizes = [*range(_GRAIN, self._most, _GRAIN), self._most]
        shapes = [(size, BatchShape(size, 1, size * (size + 1) // 2, 0, 0)) for size in sizes]
        self.tokens = target_forward_tokens((size, step_seconds(times, shape)) for size, shape in shapes)
