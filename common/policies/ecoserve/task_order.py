"""E6 · The order of waiting tasks: ranges of deadline, then of occupied KV, then length; the best fit by bisection.

`TimeSynced` keeps its waiting prompts in a `PromptQueue` and sorts its few waiting decodes by `rank`. Pure.
"""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

from cohort.common.sequence import Sequence
from cohort.common.types import Attempt

_Class = tuple[int, int, int, int]
_Entry = tuple[float, float, Attempt]


@dataclass(frozen=True, slots=True)
class Ranges:
    """E6 · EcoServe §3.3's magnitude ranges.

    `deadline_s`: bounds between ranges of the time left (the paper's example: 0.5 and 2). `overdue_s`: width of the
    ranges of late tasks' deadlines, the earliest first, so that no task starves behind new ones. `occupied_tokens`:
    width of the ranges of KV positions held.
    """

    deadline_s: tuple[float, ...] = (0.5, 2.0)
    overdue_s: float = 2.0
    occupied_tokens: int = 128

    def urgency(self, now_s: float, deadline_s: float) -> tuple[int, int]:
        """Return a rank, lower for more urgent, which is fixed once overdue."""
        remaining_s = deadline_s - now_s
        if remaining_s < 0:
            return (0, math.floor(deadline_s / self.overdue_s))
        return (1 + bisect_right(self.deadline_s, remaining_s), 0)

    def changes_s(self, now_s: float, deadline_s: float) -> float | None:
        """Return when `urgency` changes next; None: never. At least `now_s`, as the difference of two floats may be
        rounded up to a bound that is passed already."""
        remaining_s = deadline_s - now_s
        if remaining_s < 0:
            return None
        index = bisect_right(self.deadline_s, remaining_s)
        return max(now_s, deadline_s - (self.deadline_s[index - 1] if index else 0.0))


Rank = tuple[int, int, int, int, float, float, Attempt]


def rank(ranges: Ranges, now_s: float, deadline_s: float, sequence: Sequence, length: int) -> Rank:
    """E6 · Return the sort key: priority, range of the deadline, range of occupied KV (most first), length (longest
    first), arrival. Differs from the paper: a client's priority goes before everything."""
    occupied = sequence.computed // ranges.occupied_tokens
    first, second = ranges.urgency(now_s, deadline_s)
    return (sequence.request.priority, first, second, -occupied, -float(length), sequence.arrived_s, sequence.key)


class PromptQueue:
    """Waiting prompts in E6's order; with `ordered` False first come, first served within a priority.

    One sorted list per class (priority, deadline range, occupied range), by length within. A prompt changes its class
    when its deadline comes closer: `refresh` moves those that are due for it.
    """

    def __init__(self, ranges: Ranges, *, ordered: bool) -> None:
        self._ranges = ranges
        self._ordered = ordered
        self._classes: dict[_Class, list[_Entry]] = {}
        self._class_order: list[_Class] = []
        self._where: dict[Attempt, tuple[Sequence, _Class, _Entry, float]] = {}
        self._changes: list[tuple[float, Attempt]] = []

    def __len__(self) -> int:
        return len(self._where)

    def add(self, now_s: float, sequence: Sequence, deadline_s: float) -> None:
        priority = sequence.request.priority
        if self._ordered:
            first, second = self._ranges.urgency(now_s, deadline_s)
            where: _Class = (priority, first, second, -(sequence.computed // self._ranges.occupied_tokens))
            entry: _Entry = (-float(sequence.target), sequence.arrived_s, sequence.key)
            change_s = self._ranges.changes_s(now_s, deadline_s)
            if change_s is not None:
                heapq.heappush(self._changes, (change_s, sequence.key))
        else:
            where, entry = (priority, 0, 0, 0), (sequence.arrived_s, 0.0, sequence.key)
        entries = self._classes.get(where)
        if entries is None:
            entries = self._classes[where] = []
            insort(self._class_order, where)
        insort(entries, entry)
        self._where[sequence.key] = (sequence, where, entry, deadline_s)

    def remove(self, sequence: Sequence) -> bool:
        """Remove a prompt; return False if it does not wait here."""
        found = self._where.pop(sequence.key, None)
        if found is None:
            return False
        _, where, entry, _ = found
        entries = self._classes[where]
        entries.pop(bisect_left(entries, entry))
        if not entries:
            del self._classes[where]
            self._class_order.pop(bisect_left(self._class_order, where))
        return True

    def refresh(self, now_s: float) -> None:
        """Move the prompts whose deadline came into another range."""
        while self._changes and self._changes[0][0] < now_s:
            _, key = heapq.heappop(self._changes)
            found = self._where.get(key)
            if found is not None:
                self.remove(found[0])
                self.add(now_s, found[0], found[3])

    def head(self) -> tuple[Sequence, float] | None:
        """Return the first in order with its deadline; None if none waits."""
        if not self._class_order:
            return None
        found = self._where[self._classes[self._class_order[0]][0][2]]
        return found[0], found[3]

    def first(self, count: int) -> list[Sequence]:
        found: list[Sequence] = []
        for where in self._class_order:
            found += [self._where[key][0] for _, _, key in self._classes[where][: count - len(found)]]
            if len(found) == count:
                break
        return found

    def fitting(self, tokens: int) -> Sequence | None:
        """E6 · Return the longest prompt of at most `tokens` in the first class that has one, by bisection; the head or
        none under FCFS."""
        if not self._ordered:
            head = self.head()
            return head[0] if head is not None and head[0].target <= tokens else None
        for where in self._class_order:
            entries = self._classes[where]
            index = bisect_left(entries, (-float(tokens), -math.inf, ""))
            if index < len(entries):
                return self._where[entries[index][2]][0]
        return None
