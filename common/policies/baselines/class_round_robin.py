"""Round robin between real-time and best-effort requests, iteration by iteration (BROS-Round-Robin, BROS §2.2, §7.1).

Two first-come-first-served queues; iterations serve them in turn, each with continuous batching over its own sequences.
A class with nothing to run leaves its turn to the other. KV of the class that is not served stays in the cache; when a
sequence finds no block the latest arrival of either class gives way.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from cohort.common.policies.baselines.batch_builder import BatchBuilder, IterationLimits, by_arrival, whole_chunks
from cohort.common.policies.interface import IterationPlan, IterationScheduler, News, Row
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt, TrafficClass

_OTHER: dict[TrafficClass, TrafficClass] = {"rt": "be", "be": "rt"}


class ClassRoundRobin(IterationScheduler):
    """Nothing starves: each class has every other iteration, within it the earliest advances, and a request that found
    no blocks keeps later ones of both classes from taking what becomes free.

    Differs from the paper: that last rule, on which it is silent; and a prompt that an iteration has no room for is
    computed in several.
    """

    reads_runs = True  # of which it needs none

    def __init__(self, limits: IterationLimits) -> None:
        self._limits = limits
        self._sequences: dict[Attempt, Sequence] = {}
        self._turn: TrafficClass = "rt"
        self._turns: dict[TrafficClass, int] = {"rt": 0, "be": 0}

    def add(self, now_s: float, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence

    def remove(self, now_s: float, sequence: Sequence) -> None:
        self._sequences.pop(sequence.key, None)

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        sequences = sorted(self._sequences.values(), key=by_arrival)
        builder = BatchBuilder(self._limits, kv, (s for s in sequences if s.phase is Phase.RUNNING), by_arrival)
        for served in (self._turn, _OTHER[self._turn]):
            self._serve(served, sequences, kv, builder)
            if builder.rows:
                self._turn = _OTHER[served]
                self._turns[served] += 1
                break
        return builder.finish()

    def _serve(self, served: TrafficClass, sequences: list[Sequence], kv: KvAllocator, builder: BatchBuilder) -> None:
        for sequence in sequences:
            if sequence.request.traffic_class == served:
                builder.continue_row(sequence)
        alive = sum(1 for s in sequences if s.phase is Phase.RUNNING)
        for sequence in sequences:
            if sequence.phase is not Phase.WAITING and sequence.phase is not Phase.SWAPPED:
                continue
            if builder.full or builder.preempted or not self._leaves_headroom(sequence, kv, alive):
                return  # an earlier one of either class stands in the queue for memory
            if sequence.request.traffic_class != served:
                continue
            if not builder.admit(sequence):
                return
            alive += 1

    def _leaves_headroom(self, sequence: Sequence, kv: KvAllocator, alive: int) -> bool:
        """Every running sequence keeps its next block."""
        spare = kv.free_blocks + kv.cached_blocks - kv.geometry.blocks_for(sequence.target)
        return alive == 0 or spare >= min(alive, kv.total_blocks // 50)

    def chunks_ahead(self, begun: Seq[Row], single: int) -> Seq[int] | None:
        return whole_chunks(self._limits, begun, single)

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        """All are of one class then, and have every iteration."""
        return len(plan.rows) + leaving == len(self._sequences)

    def metrics(self) -> dict[str, float]:
        return {
            "swapped": float(sum(1 for s in self._sequences.values() if s.phase is Phase.SWAPPED)),
            "rt_iterations_total": float(self._turns["rt"]),
            "be_iterations_total": float(self._turns["be"]),
        }
