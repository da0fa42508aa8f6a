"""Where to split one request between two given instances: the bounded binary search of Alg. 1.

Called by the placement, with two functions that predict when each instance would be done. Knows neither instances nor
cost; pure.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """`position` s: the first segment is [0, s). `first_s`, `second_s`: T_α and T_β at s. `probes`: pairs predicted."""

    position: int
    first_s: float
    second_s: float
    probes: int

    @property
    def later_s(self) -> float:
        return max(self.first_s, self.second_s)


def search_split(
    prompt: int,
    output: int,
    first_end: Callable[[int], float],
    second_end: Callable[[int], float],
    *,
    probes: int,
    tolerance: float,
) -> Split:
    """D3 · DynaServe Alg. 1: bisect the ratio φ = s / (P + O^) until both instances end together.

    P → `prompt`; O^ → `output`, margin included; T_α(s), T_β(s) → `first_end`, `second_end`; K → `probes`;
    ε → `tolerance`, a share of the later end. Starts at φ = P / (P + O^), plain disaggregation.

    Differs from the paper: the best probe is returned, not the last one (with a bound on the probes the last may be
    worse), and s stays within [1, P + O^ − 1]; whether to split at all is asked elsewhere.
    """
    total = prompt + output
    low, high = 0.0, 1.0
    ratio = prompt / total
    best: Split | None = None
    for number in range(1, probes + 1):
        position = min(max(1, round(ratio * total)), total - 1)
        first_s, second_s = first_end(position), second_end(position)
        if best is None or max(first_s, second_s) < best.later_s:
            best = Split(position, first_s, second_s, number)
        if abs(first_s - second_s) <= tolerance * max(first_s, second_s):
            break
        if first_s > second_s:
            high = ratio
        else:
            low = ratio
        ratio = 0.5 * (low + high)
    if best is None:
        raise ValueError(f"the search needs at least one probe, got {probes}")
    return Split(best.position, best.first_s, best.second_s, number)
