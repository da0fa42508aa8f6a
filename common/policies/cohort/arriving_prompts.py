"""How much prompt work keeps arriving, by length: what will still overtake a prompt while it waits.

Where the shortest prompt goes first, a request waits for the shorter ones that are there and for those that come while
it waits: work that takes a second takes 1 / (1 - share) seconds if shorter prompts take that share of the time. Kept by
the placement over all requests that it places.
"""

from __future__ import annotations

from math import exp

_MEMORY_S = 10.0
"""What came so long ago counts 1/e."""
_STEPS = 4
"""Buckets from one length to its double."""
_MOST = 0.9
"""Share of the time at most: beyond, a queue grows without end, and the last word is the patience of clients."""


class ArrivingPrompts:
    def __init__(self) -> None:
        self._tokens: dict[int, float] = {}
        self._since_s = self._now_s = -1.0

    def arrived(self, now_s: float, tokens: int) -> None:
        """A prompt with so many tokens to compute."""
        if self._since_s < 0.0:
            self._since_s = self._now_s = now_s
        kept = exp((self._now_s - now_s) / _MEMORY_S)
        self._now_s = now_s
        self._tokens = {bucket: sum_ * kept for bucket, sum_ in self._tokens.items()}
        bucket = _bucket(tokens)
        self._tokens[bucket] = self._tokens.get(bucket, 0.0) + tokens

    def shorter_per_s(self, tokens: int) -> float:
        """Prompt tokens a second of the prompts that are shorter than this one."""
        seen_s = self._now_s - self._since_s
        if seen_s <= 0.0:
            return 0.0
        own = _bucket(tokens)
        remembered_s = _MEMORY_S * (1.0 - exp(-seen_s / _MEMORY_S))
        shorter = sum(sum_ for bucket, sum_ in self._tokens.items() if bucket < own)
        return (shorter + 0.5 * self._tokens.get(own, 0.0)) / max(remembered_s, 0.1 * _MEMORY_S)


def stretch(tokens_per_s: float, rate: float) -> float:
    """Seconds that a second becomes where so many tokens a second overtake, of `rate` that can be computed."""
    return 1.0 / (1.0 - min(_MOST, tokens_per_s / rate)) if rate > 0.0 else 1.0


def _bucket(tokens: int) -> int:
    """By powers of two, each in equal steps."""
    power = max(0, tokens.bit_length() - 1)
    return power * _STEPS + ((tokens - (1 << power)) * _STEPS >> power)
