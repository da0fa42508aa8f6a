"""Prompt work that keeps arriving, by length: what will still overtake a prompt while it waits.

Where the shortest prompt goes first, work that takes a second takes 1 / (1 - share) seconds if shorter prompts that
come later take that share of the time. Kept by the placement over all requests that it places.
"""

from __future__ import annotations

from math import exp
from typing import NamedTuple

_MEMORY_S = 10.0
"""Age at which an arrival counts 1/e."""
_STEPS = 4
"""Buckets from one length to its double."""
_MOST = 0.9
"""Max share of the time: beyond, a queue grows without end, and clients' patience decides."""


class Work(NamedTuple):
    """Prompt tokens, and positions of the cache."""

    tokens: float
    positions: float


_NOTHING = Work(0.0, 0.0)


class ArrivingPrompts:
    def __init__(self) -> None:
        self._arrived: dict[int, Work] = {}
        self._since_s = self._now_s = -1.0

    def arrived(self, now_s: float, tokens: int, positions: float) -> None:
        """Record a prompt with `tokens` to compute, whose response will hold `positions` in all."""
        if self._since_s < 0.0:
            self._since_s = self._now_s = now_s
        fade = exp((self._now_s - now_s) / _MEMORY_S)
        self._now_s = now_s
        bucket = _bucket(tokens)
        self._arrived = {each: Work(work.tokens * fade, work.positions * fade) for each, work in self._arrived.items()}
        before = self._arrived.get(bucket, _NOTHING)
        self._arrived[bucket] = Work(before.tokens + tokens, before.positions + positions)

    def shorter_per_s(self, tokens: int) -> Work:
        """Return the work that arrives per second in prompts shorter than `tokens`."""
        seen_s = self._now_s - self._since_s
        if seen_s <= 0.0:
            return _NOTHING
        own = _bucket(tokens)
        remembered_s = max(_MEMORY_S * (1.0 - exp(-seen_s / _MEMORY_S)), 0.1 * _MEMORY_S)
        alike = self._arrived.get(own, _NOTHING)
        shorter, positions = 0.5 * alike.tokens, 0.5 * alike.positions
        for bucket, work in self._arrived.items():
            if bucket < own:
                shorter, positions = shorter + work.tokens, positions + work.positions
        return Work(shorter / remembered_s, positions / remembered_s)


def slowdown(per_s: float, rate: float) -> float:
    """Return the seconds that one second becomes if `per_s` of the `rate` that can be served overtakes."""
    return 1.0 / (1.0 - min(_MOST, per_s / rate)) if rate > 0.0 else 1.0


def _bucket(tokens: int) -> int:
    """Return the bucket of a length: powers of two, each in `_STEPS` equal parts."""
    power = max(0, tokens.bit_length() - 1)
    return power * _STEPS + ((tokens - (1 << power)) * _STEPS >> power)
