"""A6 · Iterations of an aligned batch: every sequence decodes; when memory runs out, the longest is evicted.

The worker's half of batch-level scheduling (which request joins, and when, `AlignedBinding` decides at the manager).
Prompts are computed first come, first served as in `ContinuousBatching`.
"""

from __future__ import annotations

from bisect import insort
from typing import Literal

from cohort.common.policies.alignedserve.batch_numbers import batch_of, batches_of
from cohort.common.policies.baselines.batch_builder import by_arrival
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.interface import UNTIL_CHANGED, IterationPlan, News
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.policies.sequences import preempt
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt

_FAR = 256
"""Iterations: no host runs as many ahead, so a larger number need not be exact."""


class AlignedBatching(ContinuousBatching):
    """A6 case 3 · AlignedServe Alg. 2: sequences that do not fit go to the Candidate Requests Buffer, the longest
    first; while two batches run (a switch), the longest of the older one.

    Evicted requests leave with their KV, and the manager binds them to a buffer. Eviction starts while there is room
    for the KV transfer, so no iteration waits for it (in the paper one does); a sequence that grows too fast is
    preempted. `sets_aside` False: only preemption (late binding is off, or this worker stands alone).
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_step_tokens: int,
        prefill_chunk: int,
        preemption: Literal["swap", "recompute"],
        sets_aside: bool = True,
    ) -> None:
        super().__init__(
            max_rows=max_rows, max_step_tokens=max_step_tokens, prefill_chunk=prefill_chunk, preemption=preemption
        )
        self._how: Literal["swap", "recompute"] = preemption
        self._sets_aside = sets_aside
        self._leaving: set[Attempt] = set()
        """Evicted attempts that may still hold blocks."""
        self._decodes = self._mixed = self._evictions = 0

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        for number, ran in enumerate(news.runs):
            undecided, batches = ran.iterations - (number == 0), batches_of(ran.plan.rows)
            self._decodes += undecided * (batches > 0)
            self._mixed += undecided * (batches > 1)
        evicted = self._evict(kv) if self._sets_aside else []
        plan = super().decide(now_s, kv, news)
        plan.evicted = evicted
        batches = batches_of(plan.rows)
        self._decodes += batches > 0
        self._mixed += batches > 1
        return plan

    def _evict(self, kv: KvAllocator) -> list[Sequence]:
        """Evict until the low-water mark is free, counting the blocks of sequences that are leaving."""
        low = self._low_water(kv)
        free = kv.free_blocks + kv.cached_blocks
        if free >= low:
            self._leaving.clear()
            return []
        held = kv.owners()
        self._leaving &= held.keys()
        free += sum(held[key] for key in self._leaving)
        evicted: list[Sequence] = []
        while free < low:
            victim = self._victim(set()) if len(self._running) > 1 else None
            if victim is None or not victim.output_tokens:
                break
            self._running.remove(victim)
            self._leaving.add(victim.key)
            self._evictions += 1
            free += held[victim.key]
            evicted.append(victim)
        return evicted

    def _low_water(self, kv: KvAllocator) -> int:
        """Return the blocks to keep free, for half a KV transfer's time: one per running row, at most a fiftieth of the
        cache."""
        return min(len(self._running), max(2, kv.total_blocks // 50))

    def _victim(self, planned: set[Sequence]) -> Sequence | None:
        """Return the longest decoding sequence of the oldest batch."""
        able = [s for s in self._running if s.output_tokens and not s.pinned and s not in planned]
        return min(able, key=lambda s: (batch_of(s), -s.computed, s.key), default=None)

    def _make_headroom(
        self, sequence: Sequence, positions: int, kv: KvAllocator, plan: IterationPlan, planned: set[Sequence]
    ) -> bool:
        if not sequence.output_tokens:
            return super()._make_headroom(sequence, positions, kv, plan, planned)
        while not kv.extend(sequence, positions):
            victim = self._victim(planned)
            if victim is None or (victim is sequence and len(self._running) > 1 and not planned):
                return False  # the others run, or are being read: wait for them
            self._running.remove(victim)
            preempt(victim, kv, plan, self._how)
            insort(self._swapped if victim.phase is Phase.SWAPPED else self._waiting, victim, key=by_arrival)
            if victim is sequence:
                return False
        return True

    def steady_for(self, plan: IterationPlan, kv: KvAllocator) -> int:
        """Return the iterations until the low-water mark is reached: then a sequence is evicted."""
        spare, size = kv.free_blocks + kv.cached_blocks - self._low_water(kv), kv.geometry.block_size
        spare //= kv.geometry.num_groups  # a row takes one of each
        if (self._sets_aside and spare < 0) or not super().steady_for(plan, kv):
            return 0
        if not self._sets_aside:
            return UNTIL_CHANGED
        # Each row takes at most one block in `size` iterations, and has the one for the iteration in flight.
        least = size * (spare // max(1, len(plan.rows))) - 1
        if least >= _FAR:
            return least
        tables = [(row.start, len(kv.blocks(row.sequence.key))) for row in plan.rows]
        low, high = 0, size * (spare + 2)
        while low < high:
            middle = (low + high + 1) // 2
            grown = sum([max(0, (start + middle) // size + 1 - held) for start, held in tables])
            low, high = (middle, high) if grown <= spare else (low, middle - 1)
        return low

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        if self._sets_aside and kv.free_blocks + kv.cached_blocks < self._low_water(kv):
            return False  # a sequence is evicted
        return super().continues(plan, kv, leaving, undecided)

    def metrics(self) -> dict[str, float]:
        return {
            **super().metrics(),
            "decode_iterations_total": float(self._decodes),
            "mixed_iterations_total": float(self._mixed),
            "evictions_total": float(self._evictions),
        }
