"""When a worker would yield the first token of one more request: arithmetic over what is known of it. Pure functions.

    prompts before it in the worker's order ┐
    its own prompt, less what is cached     ┴ ÷ the rate that the decodes there leave  ─▶ seconds to its first token
    KV that everything there holds and will still need ÷ the cache                     ─▶ the price of memory

Times come from `step_seconds` of what the worker has learned and from nothing else.
"""

from __future__ import annotations

from math import sqrt
from typing import NamedTuple

from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import StepTimes

_PROBE_PAIRS = 1_000_000
"""Query-key pairs with which the price of one is asked."""
_CLOSE = 0.005
"""Share by which a chunk's iteration may miss the target."""
_CROWDED = 0.75
"""Share of the cache from which on held and needed KV counts against a worker."""


class Pace(NamedTuple):
    """Prompt pace of a worker: beside `decodes`, in iterations of `target_step_s`, of `chunk` tokens if these attend to
    nothing. `rate`: tokens per second while prompts wait. `token_s`, `pair_s`: seconds per added token, query-key
    pair."""

    times: StepTimes
    decodes: BatchShape
    target_step_s: float
    most: int
    least: int
    chunk: float
    rate: float
    token_s: float
    pair_s: float

    def seconds(self, tokens: int, pairs: float, later: int = 0) -> float:
        """Return the time of `tokens` with `pairs` in all. `later`: later prompt tokens in the last iteration."""
        if tokens <= 0:
            return 0.0
        rows, context = self.decodes.decodes, self.decodes.decode_context
        share_s, everything = self.pair_s * pairs / tokens, tokens + later
        if everything <= self.most:
            shape = BatchShape(everything, 1, int(pairs * everything / tokens), rows, context)
            at_once_s = step_seconds(self.times, shape)
            if at_once_s <= self.target_step_s or everything <= self.least:
                return at_once_s
        chunk, iteration_s = self.chunk, self.target_step_s
        if share_s > 0.0 and chunk > self.least:  # where the line through the chunk, with the pairs, meets the target
            chunk = max(self.least, chunk * self.token_s / (self.token_s + share_s))
        if chunk <= self.least:
            shape = BatchShape(int(chunk), 1, int(chunk * pairs / tokens), rows, context)
            iteration_s = step_seconds(self.times, shape)
        return max(1.0, tokens / chunk + 0.5 * min(1.0, later / chunk)) * iteration_s


def prompt_pace(times: StepTimes, decodes: BatchShape, target_step_s: float, *, most: int, least: int) -> Pace:
    """Compute a pace. `target_step_s`: bound of an iteration, or infinite; `most`, `least`: of its prompt tokens."""
    rows, context = decodes.decodes, decodes.decode_context

    def seconds(tokens: float) -> float:
        return step_seconds(times, BatchShape(max(1, int(tokens)), 1, 0, rows, context))

    most = max(1, most)
    pairs_s = step_seconds(times, BatchShape(most, 1, _PROBE_PAIRS, rows, context)) - seconds(most)
    pair_s = max(0.0, pairs_s) / _PROBE_PAIRS
    right, right_s = float(most), seconds(most)
    target_step_s = min(target_step_s, right_s)
    before = max(1.0, 0.9 * right)
    slope_s = max((right_s - seconds(before)) / max(1.0, right - before), 1e-9)
    # The time of an iteration bends upwards: a line through two points beyond the target meets it beyond the curve.
    for _ in range(6):
        if right_s <= target_step_s * (1.0 + _CLOSE) or right <= least:
            break
        left = right - (right_s - target_step_s) / slope_s
        if left <= max(1, least):
            right = float(least)
            break
        left_s = seconds(left)
        slope_s = max((right_s - left_s) / max(right - left, 1.0), 1e-9)
        right, right_s = left, left_s
    chunk = max(right, float(least))
    iteration_s = target_step_s if chunk > least else max(target_step_s, seconds(chunk))
    return Pace(times, decodes, target_step_s, most, least, chunk, chunk / iteration_s, slope_s, pair_s)


def fits_chunk(times: StepTimes, decodes: BatchShape, chunk: int, bound_s: float) -> bool:
    """Return whether a chunk of prompt tokens fits beside these decodes within the bound."""
    return step_seconds(times, BatchShape(chunk, 1, 0, decodes.decodes, decodes.decode_context)) <= bound_s


def memory_price_s(needed: float, variance: float, free: float, total: float) -> float:
    """Price `needed` positions in a cache of `total`, `free` of them free: a second per cacheful. An upper estimate:
    `variance` sums every prediction's (p90 − mean)²; errors cancel in part."""
    return max(0.0, (total - free + needed + sqrt(variance)) / max(total, 1.0) - _CROWDED)


def transfer_fits(transfer_s: float, tokens: float, ahead_s: float) -> bool:
    """Return whether the mean TPOT holds if the second token is `transfer_s` late, each later one `ahead_s` less."""
    return transfer_s <= max(0.0, tokens - 1.0) * ahead_s
