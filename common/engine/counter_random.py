"""Randomness without state: the random number of position t of a request depends only on (seed, t).

Called by the sampler. A request that moved, was preempted or is recovered therefore draws exactly what it would have
drawn undisturbed, and rows of one batch cannot influence each other.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def splitmix64(value: int) -> int:
    """Steele, Lea, Flood (2014): one step of SplitMix64; a bijection of 64-bit integers that passes BigCrush."""
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) for position `position` of the request with this seed; 53 random bits.

    The seed is scrambled before the position enters, so that neighbouring seeds do not walk through the same
    sequence shifted by one.
    """
    return (splitmix64(splitmix64(seed & _MASK) ^ (position & _MASK)) >> 11) * 2.0**-53
