"""Round robin between real-time and best-effort requests, iteration by iteration (BROS-Round-Robin, BROS §2.2, §7.1).

Each class has continuous batching over its own sequences; one with nothing to run leaves its turn to the other. KV of
the other class stays in the cache; without a free block the latest arrival of either class gives way.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from heapq import merge

from cohort.common.policies.baselines.arrival_queues import leaves_next_blocks
from cohort.common.policies.baselines.batch_builder import BatchBuilder, IterationLimits, by_arrival, whole_chunks
from cohort.common.policies.baselines.phase_queues import PhaseQueues
from cohort.common.policies.interface import IterationPlan, IterationScheduler, News
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Row, Sequence
from cohort.common.types import TrafficClass

_OTHER: dict[TrafficClass, TrafficClass] = {"rt": "be", "be": "rt"}


class ClassRoundRobin(IterationScheduler):
    """Iterations of both classes in turn. Nothing starves: within a class the earliest advances, and a request that
    found no blocks keeps later ones of both classes from taking what becomes free. Differs from the paper: that last
    rule, on which it is silent; and a prompt that an iteration has no room for is computed in several."""

    reads_runs = True  # of which it needs none

    def __init__(self, limits: IterationLimits) -> None:
        self._limits = limits
        self._queues = PhaseQueues()
        self._turn: TrafficClass = "rt"
        self._turns: dict[TrafficClass, int] = {"rt": 0, "be": 0}

    def add(self, now_s: float, sequence: Sequence) -> None:
        self._queues.add(sequence)

    def remove(self, now_s: float, sequence: Sequence) -> None:
        self._queues.remove(sequence)

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        running = self._queues.of(Phase.RUNNING)
        builder = BatchBuilder(self._limits, kv, running, by_arrival)
        for served in (self._turn, _OTHER[self._turn]):
            self._serve(served, running, kv, builder)
            if builder.rows:
                self._turn = _OTHER[served]
                self._turns[served] += 1
                break
        plan = builder.finish()
        self._queues.decided(plan)
        return plan

    def _serve(self, served: TrafficClass, running: Seq[Sequence], kv: KvAllocator, builder: BatchBuilder) -> None:
        for sequence in running:
            if sequence.request.traffic_class == served:
                builder.continue_row(sequence)
        if builder.preempted:  # a place that comes free is the preempted sequence's
            return
        alive = len(running)
        for sequence in merge(self._queues.of(Phase.WAITING), self._queues.of(Phase.SWAPPED), key=by_arrival):
            if builder.full or not leaves_next_blocks(kv, alive, sequence):
                return  # an earlier one of either class stands in the queue for memory
            if sequence.request.traffic_class != served:
                continue
            if not builder.admit(sequence):
                return
            alive += 1

    def chunks_ahead(self, prompts: Seq[Row], single: int) -> Seq[int] | None:
        return whole_chunks(self._limits, prompts, single)

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        """Return whether all have rows: they are of one class then, which has every iteration."""
        return len(plan.rows) + leaving == len(self._queues)

    def metrics(self) -> dict[str, float]:
        return {
            "swapped": float(len(self._queues.of(Phase.SWAPPED))),
            "rt_iterations_total": float(self._turns["rt"]),
            "be_iterations_total": float(self._turns["be"]),
        }
