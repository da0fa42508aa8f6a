"""Randomness without state: the random numbers of position t of a request depend only on (seed, t).

A request that moved, was preempted or is recovered therefore draws exactly what it would have drawn undisturbed, and
rows of one batch cannot influence each other.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
GOLDEN, MIX_1, MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def splitmix64(value: int) -> int:
    """Return one step of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers that passes BigCrush."""
    value = (value + GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


def sample_key(seed: int, position: int) -> int:
    """Return the 64-bit start of all random numbers of one sample. The seed is scrambled before the position enters, so
    that neighbouring seeds do not walk through the same sequence shifted by one."""
    return splitmix64(splitmix64(seed & _MASK) ^ (position & _MASK))


def exponentials(seed: int, position: int, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return one standard exponential number per token id, for this seed and position: 53 random bits, in [0, 36.8]."""
    key = sample_key(seed, position)
    with np.errstate(over="ignore"):
        value = (tokens.astype(np.uint64) ^ np.uint64(key)) + np.uint64(GOLDEN)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(MIX_1)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(MIX_2)
        value ^= value >> np.uint64(31)
    uniform = ((value >> np.uint64(11)).astype(np.float64) + 1.0) * 2.0**-53  # in (0, 1]
    return -np.log(uniform)
