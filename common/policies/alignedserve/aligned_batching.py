"""A6 · Iterations of an aligned batch: everybody decodes; who gives way when memory runs out is chosen by length.

The worker's half of batch-level scheduling (who joins, and when, is `AlignedBinding`'s at the manager). Prompts are
computed first come, first served as in `ContinuousBatching`.
"""

from __future__ import annotations

from bisect import insort
from typing import Literal

from cohort.common.policies.alignedserve.batch_numbers import batch_of, batches_of
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching, _order
from cohort.common.policies.interface import IterationPlan, KvAllocator, Phase, Row, Sequence, SequenceKey
from cohort.common.policies.sequences import preempt


class AlignedBatching(ContinuousBatching):
    """A6 case 3 · AlignedServe Alg. 2: who does not fit goes to the Candidate Requests Buffer, the longest first; while
    two batches run (a switch), the longest of the older one.

    Evicted requests are set aside with their KV, for the manager to bind them to a buffer; that begins while there is
    still room for the hand-over, so that no iteration waits for it. What comes too fast for that is preempted here.
    Differs from the paper: it evicts when the next iteration does not fit, and waits for the transfer.
    `sets_aside` False: only preemption (late binding is off, or this worker stands alone).
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
        self._leaving: set[SequenceKey] = set()
        """Set aside, and possibly still holding blocks."""
        self._decodes = 0
        self._mixed = 0
        self._last_mixed = False
        self._evicted = 0
        self._foreseen: Row | None = None
        """Of the last decision, if it may have been repeated without being asked for."""

    def add(self, now_s: float, sequence: Sequence) -> None:
        if sequence.phase is Phase.SWAPPED:  # from the host pool of this worker
            insort(self._swapped, sequence, key=_order)
        else:
            super().add(now_s, sequence)

    def decide(self, now_s: float, kv: KvAllocator) -> IterationPlan:
        self._count_repeated()
        aside = self._evict(kv) if self._sets_aside else []
        plan = super().decide(now_s, kv)
        plan.set_aside = aside
        batches = batches_of(plan.rows)
        self._last_mixed = batches > 1
        self._decodes += batches > 0
        self._mixed += self._last_mixed
        return plan

    def _count_repeated(self) -> None:
        """A host ran so many iterations like the last one: as far as its rows are further on than one position."""
        if self._foreseen is not None:
            repeated = max(0, self._foreseen.sequence.computed - self._foreseen.start - 1)
            self._decodes += repeated
            self._mixed += repeated * self._last_mixed
            self._foreseen = None

    def _evict(self, kv: KvAllocator) -> list[Sequence]:
        """Ahead of need: until the low-water mark is free, or will be once those who leave have left."""
        low = self._low_water(kv)
        free = kv.free_blocks + kv.cached_blocks
        if free >= low:
            self._leaving.clear()
            return []
        held = kv.owners()
        self._leaving &= held.keys()
        free += sum(held[key] for key in self._leaving)
        aside: list[Sequence] = []
        while free < low:
            victim = self._victim(set()) if len(self._running) > 1 else None
            if victim is None or not victim.output_tokens:
                break
            self._running.remove(victim)
            self._leaving.add(victim.key)
            self._evicted += 1
            free += held[victim.key]
            aside.append(victim)
        return aside

    def _low_water(self, kv: KvAllocator) -> int:
        """A block for every running row, but no more than a fiftieth of the cache; room for half a hand-over's time."""
        return min(len(self._running), max(2, kv.total_blocks // 50))

    def _victim(self, planned: set[Sequence]) -> Sequence | None:
        """Of those that decode: the longest of the oldest batch."""
        able = [s for s in self._running if s.output_tokens and not s.pinned and s not in planned]
        return min(able, key=lambda s: (batch_of(s), -s.computed, s.key), default=None)

    def _make_room(
        self, sequence: Sequence, positions: int, kv: KvAllocator, plan: IterationPlan, planned: set[Sequence]
    ) -> bool:
        if not sequence.output_tokens:
            return super()._make_room(sequence, positions, kv, plan, planned)
        while not kv.extend(sequence, positions):
            victim = self._victim(planned)
            if victim is None or (victim is sequence and len(self._running) > 1 and not planned):
                return False  # the others run, or are being read: wait for them
            self._running.remove(victim)
            preempt(victim, kv, plan, self._how)
            insort(self._swapped if victim.phase is Phase.SWAPPED else self._waiting, victim, key=_order)
            if victim is sequence:
                return False
        return True

    def repeats(self, plan: IterationPlan, kv: KvAllocator) -> bool:
        self._spare = kv.free_blocks + kv.cached_blocks - self._low_water(kv)
        self._size = kv.geometry.block_size
        self._tables = [(row.start, len(kv.blocks(row.sequence.key))) for row in plan.rows]
        repeats = (not self._sets_aside or self._spare >= 0) and super().repeats(plan, kv)
        self._foreseen = plan.rows[0] if repeats else None
        return repeats

    def repetitions(self) -> int:
        """Until the low-water mark is reached: then somebody is evicted."""
        if not self._sets_aside:
            return 1 << 30
        low, high = 0, self._size * (self._spare + 2)
        while low < high:
            middle = (low + high + 1) // 2
            grown = sum(max(0, (start + middle) // self._size + 1 - held) for start, held in self._tables)
            low, high = (middle, high) if grown <= self._spare else (low, middle - 1)
        return low

    def figures(self) -> dict[str, float]:
        return {
            **super().figures(),
            "decode_iterations_total": float(self._decodes),
            "mixed_iterations_total": float(self._mixed),
            "evictions_total": float(self._evicted),
        }
