"""A worker's sequences by phase, by priority and arrival: base of `ContinuousBatching` and `SloBatching`."""

from __future__ import annotations

from bisect import insort

from cohort.common.policies.baselines.batch_builder import by_arrival
from cohort.common.policies.interface import IterationScheduler
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Sequence


class ArrivalQueues(IterationScheduler):
    """Three queues, each sorted by `by_arrival`."""

    reads_runs = True

    def __init__(self) -> None:
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._swapped: list[Sequence] = []

    def add(self, now_s: float, sequence: Sequence) -> None:
        match sequence.phase:
            case Phase.RUNNING:
                queue = self._running
            case Phase.SWAPPED:  # parked in this worker's host memory until now
                queue = self._swapped
            case _:
                queue = self._waiting
        insort(queue, sequence, key=by_arrival)

    def remove(self, now_s: float, sequence: Sequence) -> None:
        for queue in (self._running, self._waiting, self._swapped):
            if sequence in queue:
                queue.remove(sequence)
                return


def leaves_next_blocks(kv: KvAllocator, running: int, newcomer: Sequence, *, freed_blocks: int = 0) -> bool:
    """Return whether a block stays free for each of `running` sequences; else the newcomer would preempt one.
    `freed_blocks`: of sequences that give theirs up for it."""
    spare = kv.free_blocks + kv.cached_blocks + freed_blocks - kv.geometry.blocks_for(newcomer.target)
    return not running or spare >= min(running, kv.total_blocks // 50)
