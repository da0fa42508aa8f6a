"""The step times of a worker as its reports have them: learned ones, or what its moving averages say."""

from __future__ import annotations

from cohort.common.types import StepTimes, WorkerStats

COLD = StepTimes(1e-3, 1e-4, 1e-4, 1e-2, 1e-9, 1e-8)
"""Times of a worker that has reported none; only their proportions matter, for the first requests."""


def reported_times(stats: WorkerStats, fallback: StepTimes = COLD) -> StepTimes:
    """Return the learned times; until there are any, two constants from averages and the rest from `fallback`."""
    if stats.step_times is not None:
        return stats.step_times
    rate, decode_s = stats.prefill_tokens_per_s, stats.decode_step_s
    token_s = 1.0 / rate if rate else fallback.token_s
    floor_s = decode_s or fallback.floor_s
    return StepTimes(0.0, fallback.row_s, token_s, floor_s, fallback.pair_s, fallback.position_s)
