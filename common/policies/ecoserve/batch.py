"""E3 · The decodes that run in step: when each joined, when its group ends. The clock counts iterations.

    join ──▶ one token an iteration for each ──▶ the clock reaches the group's end ──▶ ended
                         └── done or stopped before: leave

Owned by `TimeSynced`. Between two ends it does not change, so no decision is needed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from cohort.common.sequence import Sequence


class SyncedBatch:
    """E3 · EcoServe §3.2.2. A group is all decodes that end in the same iteration: those of equal length that
    joined at once, and later ones with as much left."""

    def __init__(self) -> None:
        self.clock = 0
        """Iterations that members have run in, counted by the batch's owner."""
        self.group_over = False
        """Whether a group has ended, or its last member left it, since this was last reset."""
        self.groups_ended = 0
        self._members: dict[Sequence, int] = {}
        """End of each member's group on the clock."""
        self._groups: dict[int, set[Sequence]] = {}
        self._ends: list[int] = []

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    @property
    def sequences(self) -> Iterable[Sequence]:
        return self._members

    @property
    def groups(self) -> int:
        return len(self._groups)

    @property
    def next_end(self) -> int | None:
        while self._ends and self._ends[0] not in self._groups:
            heapq.heappop(self._ends)
        return self._ends[0] if self._ends else None

    def remaining(self, sequence: Sequence) -> int:
        """Return the iterations until its group ends."""
        return self._members[sequence] - self.clock

    def join(self, sequence: Sequence, length: int) -> None:
        """Add a sequence, which runs in each of the next `length` iterations."""
        self._end_at(sequence, self.clock + length)

    def advance(self, sequence: Sequence, tokens: int) -> None:
        """Move a sequence to an earlier group: `tokens` of its drafts were right, so it is ahead of the clock."""
        end = self._members[sequence]
        self._groups[end].remove(sequence)
        if not self._groups[end]:
            del self._groups[end]
        self._end_at(sequence, max(self.clock, end - tokens))

    def _end_at(self, sequence: Sequence, end: int) -> None:
        self._members[sequence] = end
        if end not in self._groups:
            self._groups[end] = set()
            heapq.heappush(self._ends, end)
        self._groups[end].add(sequence)

    def leave(self, sequence: Sequence) -> bool:
        """Remove a sequence; return False if it is no member."""
        end = self._members.pop(sequence, None)
        if end is None:
            return False
        group = self._groups[end]
        group.remove(sequence)
        if not group:
            del self._groups[end]
            self.group_over = True
            self.groups_ended += 1
        return True

    def ended(self) -> list[Sequence]:
        """Take out the members whose group's end has come; return them in the order of arrival."""
        over: set[Sequence] = set()
        while (end := self.next_end) is not None and end <= self.clock:
            over |= self._groups[end]
            heapq.heappop(self._ends)
            for sequence in list(self._groups[end]):
                self.leave(sequence)
        return sorted(over, key=lambda s: (s.arrived_s, s.key))
