"""Where to split one request between two given instances: the bounded binary search of Alg. 1.

Called by the placement, with a function that predicts when each instance would be done; pure.
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
    prompt: int, output: int, ends_s: Callable[[int], tuple[float, float]], *, probes: int, tolerance: float
) -> Split:
    """D3 · DynaServe Alg. 1: Find the split at which both instances end together, by bisecting φ = s / (P + O^).

    P → `prompt`; O^ → `output`, margin included; T_α(s), T_β(s) → `ends_s`; K → `probes`; ε → `tolerance`, a share of
    the later end. Starts at φ = P / (P + O^), plain disaggregation.

    Differs from the paper: the best probe is returned, not the last one (with a bound on the probes the last may be
    worse), and s stays within [1, P + O^ − 1].
    """
    total = prompt + output
    low, high = 0.0, 1.0
    ratio = prompt / total
    best: Split | None = None
    for number in range(1, probes + 1):
        position = min(max(1, round(ratio * total)), total - 1)
        first_s, second_s = ends_s(position)
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
