"""SRTF: the shortest predicted remaining output runs first, decided anew in every iteration.

A baseline of EcoServe (§2.1: shortest remaining time first, iteration-level, max-allocation). A long request starves
while shorter ones keep coming, which is what the comparison is about.
"""

from __future__ import annotations

from cohort.common.policies.baselines.batch_builder import RankKey, by_arrival
from cohort.common.policies.baselines.ranked_batching import Ranking
from cohort.common.sequence import Sequence


class ShortestRemaining(Ranking):
    """Rank by predicted output less what exists, at least one token: a sequence that outlives its prediction is nearly
    done. Differs from the paper: predictions come from the predictor, not from known lengths (give the simulator true
    ones for that), and the prompt still to compute breaks ties, since it is work as well."""

    rises = True

    def key(self, sequence: Sequence) -> RankKey:
        remaining = max(1.0, sequence.predicted - sequence.output_tokens)
        return (sequence.request.priority, remaining, sequence.uncomputed, *by_arrival(sequence))
