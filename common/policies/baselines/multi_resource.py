"""MultiRes: the waiting request whose demand is nearest to what is left joins, until none fits (EcoServe §2.1).

Two resources: the device's tokens per iteration up to the target forward size, and the KV cache by exact allocation.
Each choice looks at every waiting request, so an iteration costs O(n²), as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from cohort.common.policies.baselines.batch_builder import BatchBuilder, IterationLimits, by_arrival, chunks_by_arrival
from cohort.common.policies.baselines.reserved_allocation import Reservation
from cohort.common.policies.interface import IterationPlan, IterationScheduler, News
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Row, Sequence
from cohort.common.types import Attempt


class MultiResource(IterationScheduler):
    """Nearest demand first. `limits.max_tokens` is the target forward size, `reservation` the allocator's exact
    allocation.

    Running sequences go on; swapped ones come back first, by arrival. Then, again and again, of the waiting requests
    that fit, the one whose demand vector (prompt tokens / target forward size, blocks / all blocks) has the smallest
    Euclidean distance to the vector of what is left.

    Differs from the paper: a prompt longer than what is left of the iteration is begun, or it would never be the turn
    of a long prompt while a sequence decodes. Nothing prevents starvation: a demand that is never the nearest waits
    until the queue runs dry.
    """

    reads_runs = True  # of which it needs none

    def __init__(self, limits: IterationLimits, *, reservation: Reservation) -> None:
        self._limits = limits
        self._reservation = reservation
        self._sequences: dict[Attempt, Sequence] = {}

    def add(self, now_s: float, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence

    def remove(self, now_s: float, sequence: Sequence) -> None:
        self._sequences.pop(sequence.key, None)

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        sequences = sorted(self._sequences.values(), key=by_arrival)
        running = [s for s in sequences if s.phase is Phase.RUNNING]
        builder = BatchBuilder(self._limits, kv, running, by_arrival)
        # Tokens of running responses first, so that a long prompt cannot take their place in the iteration.
        for sequence in sorted(running, key=lambda s: s.uncomputed > 1):
            builder.continue_row(sequence)
        if builder.preempted:
            return builder.finish()
        for sequence in sequences:
            if sequence.phase is Phase.SWAPPED and not builder.admit(sequence):
                return builder.finish()
        waiting = [s for s in sequences if s.phase is Phase.WAITING]
        while waiting and not builder.full:
            chosen = self._nearest(waiting, kv, builder)
            if chosen is None or not builder.admit(chosen):
                break
            waiting.remove(chosen)
        return builder.finish()

    def _nearest(self, waiting: list[Sequence], kv: KvAllocator, builder: BatchBuilder) -> Sequence | None:
        free_blocks = kv.free_blocks + kv.cached_blocks
        tokens_left = builder.tokens_left / self._limits.max_tokens
        blocks_left = free_blocks / kv.total_blocks
        nearest: Sequence | None = None
        smallest = math.inf
        for sequence in waiting:
            blocks = kv.geometry.blocks_for(self._reservation(sequence))
            if blocks > free_blocks:
                continue
            tokens = min(sequence.uncomputed, self._limits.max_tokens) / self._limits.max_tokens
            distance = math.hypot(tokens_left - tokens, blocks_left - blocks / kv.total_blocks)
            if distance < smallest:  # of equals the earliest: they come in order of arrival
                nearest, smallest = sequence, distance
        return nearest

    def chunks_ahead(self, prompts: Seq[Row], single: int) -> Seq[int] | None:
        return chunks_by_arrival(self._limits, prompts, single)

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        """Return whether every sequence has a row, or none of those that wait finds a place."""
        rows = len(plan.rows)
        if rows + leaving == len(self._sequences):
            return True
        waiting = [s for s in self._sequences.values() if s.phase is Phase.WAITING]
        if leaving or rows + len(waiting) != len(self._sequences):
            return False
        if rows >= self._limits.max_rows or plan.tokens >= self._limits.max_tokens:
            return True
        free = kv.free_blocks + kv.cached_blocks
        return all(kv.geometry.blocks_for(self._reservation(s)) > free for s in waiting)

    def metrics(self) -> dict[str, float]:
        return {"swapped": float(sum(1 for s in self._sequences.values() if s.phase is Phase.SWAPPED))}
