"""Iteration-level scheduling by rank: in every iteration the best ranked sequences run.

Three baselines differ in their `Ranking`: arrival (ORCA), shortest remaining output (SRTF), feedback queues
(FastServe). A running sequence that is not in the plan keeps its KV. With `evicting`, a better ranked newcomer takes
the place in the cache of worse ranked sequences; without, it waits until a sequence ends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from cohort.common.policies.baselines.batch_builder import (
    BatchBuilder,
    IterationLimits,
    RankKey,
    by_arrival,
    whole_chunks,
)
from cohort.common.policies.baselines.reserved_allocation import Reservation
from cohort.common.policies.interface import UNTIL_CHANGED, IterationPlan, IterationScheduler, News, Ran
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Row, Sequence
from cohort.common.types import Attempt


class Ranking(ABC):
    steady = False
    """Flag: the order of sequences that run together never changes while they do."""
    rises = False
    """Flag: keys of running sequences never grow, those of waiting ones are fixed: who ranks last stays last."""

    @abstractmethod
    def key(self, sequence: Sequence) -> RankKey:
        """Rank a sequence, lowest first, without ties; fixed from `begin` to the end of the iteration."""

    def added(self, now_s: float, sequence: Sequence) -> None:
        """Begin to rank a sequence."""
        return

    def removed(self, sequence: Sequence) -> None:
        """Forget a sequence."""
        return

    def begin(self, now_s: float, sequences: Iterable[Sequence]) -> None:
        """Prepare for a plan of these sequences."""
        return

    def observe(self, ran: Ran) -> None:
        """Learn from an iteration; before `begin` of the next."""
        return

    def metrics(self) -> dict[str, float]:
        return {}


class ArrivalRanking(Ranking):
    """ORCA's order (its Algorithm 1): first come, first served within a priority."""

    steady = rises = True

    def key(self, sequence: Sequence) -> RankKey:
        return by_arrival(sequence)


class RankedBatching(IterationScheduler):
    """Best ranked sequences first. `reservation` is the allocator's: the positions that a newcomer asks for. ORCA (Yu
    et al., OSDI 2022, Algorithm 1) is this with `ArrivalRanking`, max-allocation, its fixed batch size as `max_rows`,
    whole prompts, and no eviction. Differs from ORCA: a prompt of more tokens than an iteration has left is computed in
    several (ORCA bounds rows alone), and a sequence that came by KV transfer and finds no block makes the latest give
    way."""

    reads_runs = True

    def __init__(self, ranking: Ranking, limits: IterationLimits, *, reservation: Reservation, evicting: bool) -> None:
        self._ranking = ranking
        self._limits = limits
        self._reservation = reservation
        self._evicting = evicting
        self._sequences: dict[Attempt, Sequence] = {}
        self._known_when_admitted: dict[Attempt, int] = {}

    def add(self, now_s: float, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence
        self._ranking.added(now_s, sequence)

    def remove(self, now_s: float, sequence: Sequence) -> None:
        if self._sequences.pop(sequence.key, None) is not None:
            self._known_when_admitted.pop(sequence.key, None)
            self._ranking.removed(sequence)

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        for ran in news.runs:
            self._ranking.observe(ran)
        sequences = list(self._sequences.values())
        self._ranking.begin(now_s, sequences)
        builder = BatchBuilder(self._limits, kv, (s for s in sequences if s.phase is Phase.RUNNING), self._ranking.key)
        fresh = {
            key for key, known in self._known_when_admitted.items() if self._sequences[key].known <= known
        }  # no token sampled since
        queue_stands = False
        for sequence in sorted(sequences, key=self._ranking.key):
            if builder.full:
                break
            if sequence.phase is Phase.RUNNING:
                builder.continue_row(sequence)
            elif not queue_stands:
                # No sequence of a worse rank overtakes one that does not fit, or large requests would wait forever.
                queue_stands = not self._admit(sequence, kv, builder, fresh)
        return builder.finish()

    def _admit(self, sequence: Sequence, kv: KvAllocator, builder: BatchBuilder, fresh: set[Attempt]) -> bool:
        if not self._evicting:
            # A sequence that runs out of blocks must find them next time: no newcomer in such an iteration.
            return not builder.preempted and builder.admit(sequence)
        admitted = builder.admit_by_force(sequence, kv.geometry.blocks_for(self._reservation(sequence)), fresh)
        if admitted:
            self._known_when_admitted[sequence.key] = sequence.known
        return admitted

    def steady_for(self, plan: IterationPlan, kv: KvAllocator) -> int:
        """Return `UNTIL_CHANGED` if all decode, or the rows are all there are and none can preempt another."""
        if not self._ranking.steady or plan.preempted or plan.copies or any(row.count != 1 for row in plan.rows):
            return 0
        if any(row.sequence.phase is not Phase.RUNNING for row in plan.rows):
            return 0
        if len(plan.rows) == len(self._sequences):
            return UNTIL_CHANGED
        running = sum(1 for s in self._sequences.values() if s.phase is Phase.RUNNING)
        full = len(plan.rows) >= min(self._limits.max_rows, self._limits.max_tokens)
        return UNTIL_CHANGED if full and running == len(plan.rows) and not self._evicting else 0

    def chunks_ahead(self, prompts: Seq[Row], single: int) -> Seq[int] | None:
        return whole_chunks(self._limits, prompts, single)

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        """Return whether every sequence has a row, or the best ranked newcomer, and so each, finds no place."""
        rows = len(plan.rows)
        if rows + leaving == len(self._sequences):
            return True
        waiting = [s for s in self._sequences.values() if s.phase is Phase.WAITING]
        if leaving or not self._ranking.rises or rows + len(waiting) != len(self._sequences):
            return False
        key = self._ranking.key
        first = min(waiting, key=key)
        comes_last = key(first) > max(key(row.sequence) for row in plan.rows)
        # Of its prompt a prefix cache may hold all but the last block.
        geometry = kv.geometry
        cached = (first.target - 1) // geometry.block_size * geometry.num_groups
        needs = geometry.blocks_for(self._reservation(first)) - cached
        if needs > kv.free_blocks + kv.cached_blocks:
            return comes_last or not self._evicting
        return comes_last and (rows >= self._limits.max_rows or plan.tokens >= self._limits.max_tokens)

    def metrics(self) -> dict[str, float]:
        swapped = sum(1 for s in self._sequences.values() if s.phase is Phase.SWAPPED)
        return {"swapped": float(swapped), **self._ranking.metrics()}
