"""SRTF: the shortest predicted remaining output runs first, decided anew in every iteration.

A baseline of EcoServe (§2.1: shortest remaining time first, iteration-level, max-allocation). Used as a ranking of
`RankedBatching`. Makes no promise against starvation: a long request waits while shorter ones keep coming, which is
what the comparison is about.
"""

from __future__ import annotations

from collections.abc import Iterable

from cohort.common.policies.baselines.draft import RankKey, by_arrival
from cohort.common.policies.interface import IterationPlan, Sequence


class ShortestRemaining:
    """Remaining = predicted output less what exists, at least one token: who outlives its prediction is nearly done.

    Differs from the paper: predictions come from the predictor, not from known lengths (give the simulator true ones
    for that), and the prompt still to compute breaks ties, since it is work as well.
    """

    steady = False

    def key(self, sequence: Sequence) -> RankKey:
        remaining = max(1.0, sequence.predicted - sequence.output_tokens)
        return (sequence.request.priority, remaining, sequence.uncomputed, *by_arrival(sequence))

    def added(self, now_s: float, sequence: Sequence) -> None:
        """Everything is in the sequence."""

    def removed(self, sequence: Sequence) -> None:
        """Nothing is kept."""

    def begin(self, now_s: float, sequences: Iterable[Sequence]) -> None:
        """Keys are read while nothing is computed."""

    def observe(self, now_s: float, plan: IterationPlan, latency_s: float) -> None:
        """Lengths, not times, decide."""

    def figures(self) -> dict[str, float]:
        return {}
