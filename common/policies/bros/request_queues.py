"""The queues of R1 and the order they are pulled in (R5), for real-time and for best-effort requests.

Waiting = nothing computed yet. Pending = started, and not in the current batch: most hold KV here. Owned by the
packing; decides nothing but order.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from itertools import chain

from cohort.common.policies.bros.token_groups import TokenGroups
from cohort.common.policies.kv_interface import BlockSharing
from cohort.common.sequence import Phase, Sequence
from cohort.common.types import Attempt

Candidate = tuple[float, Attempt, Sequence]
"""Residual time, deadline or arrival; key, sequence. The least goes first."""


def _first(candidate: Candidate) -> float:
    return candidate[0]


class UrgentFirst:
    """Fig. 8 · Two ordered queues, merged lazily. No request may start or leave meanwhile.

    Those before `place` and `at` cannot make it any more. They can be asked for when others have started since.
    """

    def __init__(self, now_s: float, pending: list[Candidate], place: int, waiting: list[Candidate], at: int) -> None:
        self._now_s = now_s
        self._pending, self._place, self._late = pending, place, place
        self._waiting, self._at, self._end = waiting, at, len(waiting)
        self._late_waiting = at

    def past_due_started(self) -> Iterator[Sequence]:
        """Of `past_due` the requests that had started before this decision."""
        return (item[2] for item in self._pending[: self._late])

    def past_due(self) -> Iterator[Sequence]:
        """Requests that miss their deadline in any case: started ones first, each by deadline. A yielded request may
        start meanwhile."""
        yield from self.past_due_started()
        yield from (item[2] for item in self._waiting[: self._late_waiting])

    def started_on_time(self) -> Iterator[Sequence]:
        return (item[2] for item in self._pending[self._late :])

    def skip_waiting(self) -> None:
        """From now on only requests that have started."""
        self._end = self._at

    def __iter__(self) -> Iterator[Candidate]:
        pending, waiting = self._pending, self._waiting
        while self._at < self._end:
            due_s, key, sequence = waiting[self._at]
            residual_s = due_s - self._now_s
            if self._place < len(pending) and pending[self._place][0] <= residual_s:
                self._place += 1
                yield pending[self._place - 1]
            else:
                self._at += 1
                yield (residual_s, key, sequence)
        while self._place < len(pending):
            self._place += 1
            yield pending[self._place - 1]


class _Queues:
    """Waiting requests by a time of theirs that does not change, and pending ones as they came."""

    def __init__(self, waits_by: Callable[[Sequence], float]) -> None:
        self._waits_by = waits_by
        self._waiting: list[Candidate] = []
        self._place: dict[Attempt, float] = {}
        """Of the waiting requests."""
        self._pending: dict[Attempt, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting) + len(self._pending)

    def add(self, sequence: Sequence) -> None:
        if sequence.phase is Phase.WAITING and sequence.output_tokens == 0:
            place = self._place[sequence.key] = self._waits_by(sequence)
            insort(self._waiting, (place, sequence.key, sequence))
        else:
            self._pending[sequence.key] = sequence

    def remove(self, sequence: Sequence) -> None:
        if self._pending.pop(sequence.key, None) is None:
            self._leave(sequence)

    def started(self, sequence: Sequence) -> None:
        """It got its first blocks: from waiting to pending."""
        self._leave(sequence)
        self._pending[sequence.key] = sequence

    def _leave(self, sequence: Sequence) -> None:
        place = self._place.pop(sequence.key, None)
        if place is not None:
            del self._waiting[bisect_left(self._waiting, (place, sequence.key), key=lambda item: item[:2])]

    def pending(self) -> Collection[Sequence]:
        return self._pending.values()


class RealTimeQueues(_Queues):
    """R5 · The waiting queue is always in the order of its deadlines; only the pending ones are sorted, and the two are
    merged lazily.

    Differs from the paper: waiting requests are kept by deadline, which is arrival order where all have one target.
    """

    def __init__(self, groups: TokenGroups) -> None:
        super().__init__(groups.due_s)
        self._groups = groups

    def remove(self, sequence: Sequence) -> None:
        self._groups.forget(sequence)
        super().remove(sequence)

    @property
    def anybody_waits(self) -> bool:
        return bool(self._waiting)

    def urgent_first(self, now_s: float, average_s: float, least_s: float) -> UrgentFirst:
        """R4, lines 3–4 · All requests with at least `least_s` left, most urgent first."""
        groups = self._groups
        pending = sorted(
            (groups.residual_s(now_s, sequence, average_s), key, sequence) for key, sequence in self._pending.items()
        )
        return UrgentFirst(
            now_s,
            pending,
            bisect_left(pending, least_s, key=_first),
            self._waiting,
            bisect_left(self._waiting, now_s + least_s, key=_first),
        )


class BestEffortQueues(_Queues):
    """R4, line 17 · Best-effort requests by the slots that would have to come back, then by arrival."""

    def __init__(self) -> None:
        super().__init__(lambda sequence: sequence.arrived_s)

    def first_within(self, most: int, blocks: int, blocks_for: Callable[[int], int]) -> list[Sequence]:
        """Up to `most`: started requests first, then by arrival, as far as the KV of all with a next token fits so
        many blocks."""
        first: list[Sequence] = []
        for sequence in chain(self._pending.values(), (item[2] for item in self._waiting)):
            blocks -= blocks_for(sequence.target + 1)
            if blocks < 0 or len(first) == most:
                break
            first.append(sequence)
        return first

    def waiting(self, most: int) -> list[Sequence]:
        """Up to `most` of the waiting requests, by arrival: they have no KV on any worker."""
        return [item[2] for item in self._waiting[:most]]

    def by_slots(self, sharing: BlockSharing | None) -> tuple[list[Sequence], list[tuple[int, Sequence]]]:
        """Pending requests: those whose KV is all here, by arrival; the others with the slots that have to come back,
        fewest first. Waiting requests belong between the two."""
        whole: list[Candidate] = []
        apart: list[tuple[int, float, Attempt, Sequence]] = []
        for key, sequence in self._pending.items():
            slots = slots_away(sequence, sharing)
            if slots:
                apart.append((slots, sequence.arrived_s, key, sequence))
            else:
                whole.append((sequence.arrived_s, key, sequence))
        whole.sort()
        apart.sort()
        return [item[2] for item in whole], [(item[0], item[3]) for item in apart]


def slots_away(sequence: Sequence, sharing: BlockSharing | None) -> int:
    """R10 · Slots that have to come from host memory before the sequence can run."""
    if sharing is not None:
        return sharing.checkpointed(sequence.key)
    return sequence.computed if sequence.phase is Phase.SWAPPED else 0
