"""Waiting requests by length: the oldest, shortest or longest of any range of lengths in O(log cells).

Lengths fall into cells of equal width (a bucket is a range of cells). A segment tree over the cells keeps per node
which request below it is due first; a cell's requests lie in order (`DueList`); cells and groups of cells are
counted. Splitting and merging buckets moves no request (B5, B11). Owned by `prefill_order.py`, one index per task
class; decides nothing.

All requests grow more urgent at the same pace, so the order of two is fixed when they arrive, and no queue needs a
refresh. Nothing starves: all requests that arrive after a request's due time are due after it (B10).

Invariant: counts and `best[node]` equal what a walk over the live entries finds; `check()` compares.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from operator import itemgetter

from cohort.common.errors import InvariantViolated
from cohort.common.types import Request

Entry = int
"""Due time of a request and its serial number in one number (`entry_of`)."""
_SERIAL_BITS = 48
SERIAL = (1 << _SERIAL_BITS) - 1
"""`entry & SERIAL` is the entry's serial number."""
_LEVELS = 100
"""Greatest priority that counts: a client's number must not buy an unbounded head start."""

_SENTINEL: Entry = 1 << 200
"""Entry that is due after all others; recognised by identity."""
_GROUP = 64
"""Cells counted together, so that counting a range adds up a few dozen numbers."""
_RUN = 128
"""Greatest length of a run of a `DueList`: inserting and deleting move no more entries."""
_first = itemgetter(0)


def due_s(request: Request, *, priority_step_s: float, offline_delay_s: float) -> float:
    """B6, B10 · Return the time at which this request is as urgent as an online one of priority 0 that arrives then.

    BucketServe §III: the longest waiting go first, online work before offline, higher priorities (lower numbers here)
    before lower ones. The paper gives no weights.
    """
    level = min(_LEVELS, max(-_LEVELS, request.priority))
    return request.arrival_s + level * priority_step_s + (0.0 if request.online else offline_delay_s)


def entry_of(due_s: float, serial: int) -> int:
    """Return one number that sorts as the pair: `due_s` to a nanosecond, ties broken by `serial` (below 2⁴⁸): it is
    compared faster than a tuple."""
    return (int(due_s * 1e9) << _SERIAL_BITS) + serial


class DueList:
    """The waiting requests of one cell, in the order in which they are due: ascending runs of bounded length.

    The last to arrive is nearly always the last due, so adding appends; a heap would compare two entries on every
    level, which in long queues are in no cache. Never empty: made with its first entry, thrown away with its last.
    O(log entries + `_RUN`) per change.
    """

    __slots__ = ("_runs",)

    def __init__(self, entry: Entry) -> None:
        self._runs = [[entry]]

    @property
    def first(self) -> Entry:
        return self._runs[0][0]

    def __iter__(self) -> Iterator[Entry]:
        return (entry for run in self._runs for entry in run)

    def add(self, entry: Entry) -> bool:
        """Add an entry; return whether it is the first now."""
        runs = self._runs
        index = len(runs) - 1
        run = runs[index]
        first = False
        if entry > run[-1]:
            run.append(entry)
        else:
            if entry < run[0] and index:
                index = max(0, bisect_right(runs, entry, key=_first) - 1)
                run = runs[index]
            insort(run, entry)
            first = index == 0 and run[0] == entry
        if len(run) > _RUN:
            half = len(run) // 2
            runs.insert(index + 1, run[half:])
            del run[half:]
        return first

    def remove(self, entry: Entry) -> bool:
        """Delete an entry, which must be in the list; return whether others remain."""
        runs = self._runs
        index = 0
        run = runs[0]
        if run[0] == entry:  # the usual case
            del run[0]
        else:
            index = bisect_right(runs, entry, key=_first) - 1
            run = runs[index]
            del run[bisect_left(run, entry)]
        if not run:
            del runs[index]
        return bool(runs)


class LengthIndex:
    def __init__(self, cells: int) -> None:
        leaves = 1
        while leaves < cells:
            leaves *= 2
        self._leaves = leaves
        self._counts = [0] * leaves
        self._group_counts = [0] * (leaves // _GROUP + 1)
        self._total = 0
        self._best: list[Entry] = [_SENTINEL] * (2 * leaves)
        self._waiting: dict[int, DueList] = {}
        self._covered = (0, 0)
        self._nodes: list[int] = []

    def __len__(self) -> int:
        return self._total

    @property
    def oldest(self) -> Entry | None:
        """Entry due first among all; None if there is none."""
        return self._best[1] if self._total else None

    def add(self, cell: int, entry: Entry) -> None:
        self._counts[cell] += 1
        self._group_counts[cell // _GROUP] += 1
        self._total += 1
        waiting = self._waiting.get(cell)
        if waiting is None:
            self._waiting[cell] = DueList(entry)
        elif not waiting.add(entry):
            return
        best = self._best
        node = cell + self._leaves
        while node and entry < best[node]:  # an entry due before it here is so all the way up
            best[node] = entry
            node >>= 1

    def remove(self, cell: int, entry: Entry) -> None:
        """Delete `entry`, which must be in `cell`."""
        self._counts[cell] -= 1
        self._group_counts[cell // _GROUP] -= 1
        self._total -= 1
        waiting = self._waiting[cell]
        remain = waiting.remove(entry)
        if not remain:
            del self._waiting[cell]
        best = self._best
        node = cell + self._leaves
        if best[node] != entry:  # another entry was due first
            return
        best[node] = waiting.first if remain else _SENTINEL
        node >>= 1
        while node and best[node] == entry:  # where it was not the first, it is not so further up
            left, right = best[2 * node], best[2 * node + 1]
            best[node] = left if left < right else right
            node >>= 1

    def count(self, low: int, high: int) -> int:
        """Return the number of requests in cells [low, high)."""
        first, last = -(-low // _GROUP), high // _GROUP  # whole groups
        if first >= last:
            return sum(self._counts[low:high])
        return (
            sum(self._counts[low : first * _GROUP])
            + sum(self._group_counts[first:last])
            + sum(self._counts[last * _GROUP : high])
        )

    def first_due(self, low: int, high: int) -> Entry | None:
        """Return the most urgent in cells [low, high); None if they are empty."""
        found = _SENTINEL
        best = self._best
        for node in self._cover(low, high):
            if best[node] < found:
                found = best[node]
        return None if found is _SENTINEL else found

    def shortest(self, low: int, high: int) -> Entry | None:
        """Return the most urgent of the lowest occupied cell in [low, high)."""
        return self._outermost(self._cover(low, high), 0)

    def longest(self, low: int, high: int) -> Entry | None:
        """Return the most urgent of the highest occupied cell in [low, high)."""
        return self._outermost(reversed(self._cover(low, high)), 1)

    def _outermost(self, nodes: Iterable[int], side: int) -> Entry | None:
        """Return the most urgent of the outermost occupied cell below the first occupied node; `side`: 0 left, 1
        right."""
        best = self._best
        for node in nodes:
            if best[node] is not _SENTINEL:
                while node < self._leaves:
                    node = 2 * node + side if best[2 * node + side] is not _SENTINEL else 2 * node + 1 - side
                return best[node]
        return None

    def _cover(self, low: int, high: int) -> list[int]:
        """Return the nodes that together are [low, high), left to right. The last range is cached for a batch."""
        if self._covered == (low, high):
            return self._nodes
        self._covered = low, high
        left: list[int] = []
        right: list[int] = []
        low, high = low + self._leaves, high + self._leaves
        while low < high:
            if low & 1:
                left.append(low)
                low += 1
            if high & 1:
                high -= 1
                right.append(high)
            low >>= 1
            high >>= 1
        self._nodes = left + right[::-1]
        return self._nodes

    def check(self) -> None:
        """Raise `InvariantViolated` when a node disagrees with the entries below it."""
        for cell in range(self._leaves):
            waiting = list(self._waiting.get(cell, ()))
            if self._counts[cell] != len(waiting) or self._best[cell + self._leaves] != min(waiting, default=_SENTINEL):
                raise InvariantViolated(f"cell {cell}: counted {self._counts[cell]}, found {len(waiting)}")
        for group, count in enumerate(self._group_counts):
            if count != sum(self._counts[group * _GROUP : (group + 1) * _GROUP]):
                raise InvariantViolated(f"group {group}: count differs from its cells")
        if self._total != sum(self._counts):
            raise InvariantViolated(f"counted {self._total} in all, {sum(self._counts)} by cells")
        for node in range(1, self._leaves):
            if self._best[node] != min(self._best[2 * node], self._best[2 * node + 1]):
                raise InvariantViolated(f"node {node}: not the first due of its children")
