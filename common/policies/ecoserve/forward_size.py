"""E1 · The target forward size: tokens of one iteration from which on more of them no longer go faster.

Found by `cohort profile` from measured iterations and given to the scheduler as `engine.target_forward_tokens`. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable

from cohort.common.errors import ConfigError


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
