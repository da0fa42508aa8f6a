"""Round robin between real-time and best-effort requests, iteration by iteration (BROS-Round-Robin, BROS §2.2, §7.1).

Two first-come-first-served queues; iterations serve them in turn, each with continuous batching over its own sequences.
A class with nothing to run leaves its turn to the other. KV of the class that is not served stays in the cache; when a
sequence finds no block the latest arrival of either class gives way. Where memory is short requests of both classes
start in turn, too: a request waits for earlier ones of its own class, and for one of the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from heapq import merge
from itertools import chain

from cohort.common.policies.baselines.batch_builder import BatchBuilder, IterationLimits, by_arrival, whole_chunks
from cohort.common.policies.baselines.phase_queues import PhaseQueues
from cohort.common.policies.interface import IterationPlan, IterationScheduler, News, Row
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import TrafficClass

_OTHER: dict[TrafficClass, TrafficClass] = {"rt": "be", "be": "rt"}


class ClassRoundRobin(IterationScheduler):
    """Nothing starves: each class has every other iteration, within it the earliest advances, and the class whose next
    request found no blocks first has what becomes free until that one has started; then it is the other's turn.

    Differs from the paper: that last rule, as it does not say whose turn it is for memory; and a prompt that an
    iteration has no room for is computed in several.
    """

    reads_runs = True  # of which it needs none

    def __init__(self, limits: IterationLimits) -> None:
        self._limits = limits
        self._queues: dict[TrafficClass, PhaseQueues] = {"rt": PhaseQueues(), "be": PhaseQueues()}
        self._turn: TrafficClass = "rt"
        self._turns: dict[TrafficClass, int] = {"rt": 0, "be": 0}
        self._short: list[TrafficClass] = []
        """Classes whose next request found no blocks, in the order in which they have a turn for memory."""

    def add(self, now_s: float, sequence: Sequence) -> None:
        self._queues[sequence.request.traffic_class].add(sequence)

    def remove(self, now_s: float, sequence: Sequence) -> None:
        self._queues[sequence.request.traffic_class].remove(sequence)

    def decide(self, now_s: float, kv: KvAllocator, news: News) -> IterationPlan:
        running = self._both(Phase.RUNNING)
        builder = BatchBuilder(self._limits, kv, running, by_arrival)
        for served in (self._turn, _OTHER[self._turn]):
            self._serve(served, len(running), kv, builder)
            if builder.rows:
                self._turn = _OTHER[served]
                self._turns[served] += 1
                break
        plan = builder.finish()
        for queues in self._queues.values():
            queues.decided(plan)
        return plan

    def _serve(self, served: TrafficClass, alive: int, kv: KvAllocator, builder: BatchBuilder) -> None:
        for sequence in self._queues[served].of(Phase.RUNNING):
            builder.continue_row(sequence)
        if builder.preempted:  # a place that comes free is the preempted sequence's
            return
        other = _OTHER[served]
        for sequence in self._next(served):
            if builder.full:
                return
            kept = self._wanted(other, kv) if self._short[:1] == [other] else 0
            if not self._leaves_headroom(sequence, kv, alive, kept):
                if served not in self._short:
                    self._short.append(served)
                return
            if not builder.admit(sequence):
                return
            alive += 1
            if served in self._short:
                self._short.remove(served)

    def _next(self, of_class: TrafficClass) -> Iterable[Sequence]:
        """Those of a class that are to start or to come back, by arrival."""
        queues = self._queues[of_class]
        return merge(queues.of(Phase.WAITING), queues.of(Phase.SWAPPED), key=by_arrival)

    def _both(self, phase: Phase) -> list[Sequence]:
        return list(chain.from_iterable(queues.of(phase) for queues in self._queues.values()))

    def _wanted(self, of_class: TrafficClass, kv: KvAllocator) -> int:
        """Blocks of its next request."""
        head = next(iter(self._next(of_class)), None)
        return kv.geometry.blocks_for(head.target) if head is not None else 0

    def _leaves_headroom(self, sequence: Sequence, kv: KvAllocator, alive: int, kept: int) -> bool:
        """Every running sequence keeps its next block, and the other class what it has a turn for."""
        spare = kv.free_blocks + kv.cached_blocks - kv.geometry.blocks_for(sequence.target) - kept
        return spare >= min(alive, kv.total_blocks // 50) if alive else not kept

    def chunks_ahead(self, begun: Seq[Row], single: int) -> Seq[int] | None:
        return whole_chunks(self._limits, begun, single)

    def continues(self, plan: IterationPlan, kv: KvAllocator, leaving: int, undecided: int) -> bool:
        """All are of one class then, and have every iteration."""
        return len(plan.rows) + leaving == sum(map(len, self._queues.values()))

    def metrics(self) -> dict[str, float]:
        return {
            "swapped": float(len(self._both(Phase.SWAPPED))),
            "rt_iterations_total": float(self._turns["rt"]),
            "be_iterations_total": float(self._turns["be"]),
        }
