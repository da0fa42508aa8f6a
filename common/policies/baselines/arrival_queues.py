"""The sequences of a worker by phase, each queue in the order of priority and arrival.

Base of schedulers that serve them in that order (`ContinuousBatching`, DynaServe's `SloBatching`): they decide which
rows run; here are only the queues, and the rule that a newcomer leaves running sequences their next block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Collection, Iterable

from cohort.common.policies.baselines.batch_builder import by_arrival
from cohort.common.policies.interface import IterationScheduler, Ran
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.sequence import Phase, Sequence


class PromptSort(ABC):
    """Another order of prompts than that of arrival."""

    @abstractmethod
    def learn(self, ran: Ran) -> None:
        """An iteration has run."""

    @abstractmethod
    def sort(self, now_s: float, prompts: Iterable[Sequence]) -> list[Sequence]:
        """First those to be computed first, begun or not."""


class ArrivalQueues(IterationScheduler):
    """All three queues are sorted by `by_arrival`. With `prompts` prompts are computed in that order instead, begun or
    not; decode rows, and which sequence gives way, still go by arrival."""

    reads_runs = True

    def __init__(self, prompts: PromptSort | None = None) -> None:
        self._prompts = prompts
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

    def _prompts_in_order(self, now_s: float, begun: Collection[Sequence] | None = None) -> list[Sequence]:
        """Begun ones, then swapped and waiting ones; or as `prompts` sorts them all. `begun`: where they are known."""
        if begun is None:
            begun = [s for s in self._running if s.uncomputed > 1]
        if self._prompts is None:
            return [*begun, *self._swapped, *self._waiting]
        return self._prompts.sort(now_s, [*begun, *self._swapped, *self._waiting])

    def remove(self, now_s: float, sequence: Sequence) -> None:
        for queue in (self._running, self._waiting, self._swapped):
            if sequence in queue:
                queue.remove(sequence)
                return


def leaves_next_blocks(
    kv: KvAllocator, running: Collection[Sequence], newcomer: Sequence, *, freed_blocks: int = 0
) -> bool:
    """A block for every running sequence stays free, or the newcomer is admitted only to preempt another.
    `freed_blocks`: of sequences that give theirs up for it."""
    spare = kv.free_blocks + kv.cached_blocks + freed_blocks - kv.geometry.blocks_for(newcomer.target)
    return not running or spare >= min(len(running), kv.total_blocks // 50)
