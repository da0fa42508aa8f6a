"""The sequences of a worker by phase, each queue in the order of arrival: for schedulers that look at the head of each.

Under overload thousands wait, and a decision concerns few. A scheduler reports every sequence that comes or goes, and
every plan that it made (`decided`): phases change nowhere else.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq

from cohort.common.policies.baselines.batch_builder import by_arrival
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt


class PhaseQueues:
    def __init__(self) -> None:
        self._queues: dict[Phase, list[Sequence]] = {phase: [] for phase in Phase}
        self._filed: dict[Attempt, tuple[Sequence, Phase]] = {}
        """Sequences with the queue that each is in."""

    def __len__(self) -> int:
        return len(self._filed)

    def add(self, sequence: Sequence) -> None:
        """Insert a sequence into the queue of its phase; it may be in another one."""
        self.remove(sequence)
        phase = sequence.phase
        self._filed[sequence.key] = sequence, phase
        insort(self._queues[phase], sequence, key=by_arrival)

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence, if it is here."""
        filed = self._filed.pop(sequence.key, None)
        if filed is not None:
            known, phase = filed
            queue = self._queues[phase]
            del queue[bisect_left(queue, by_arrival(known), key=by_arrival)]

    def of(self, phase: Phase) -> Seq[Sequence]:
        """Return a queue by arrival. It changes in `add`, `remove` and `decided` only."""
        return self._queues[phase]

    def decided(self, plan: IterationPlan) -> None:
        """Move the sequences that this decision started, resumed or preempted."""
        filed = self._filed
        moved = [row.sequence for row in plan.rows if filed[row.sequence.key][1] is not row.sequence.phase]
        moved += [preempted.sequence for preempted in plan.preempted]
        for sequence in moved:
            self.add(sequence)
