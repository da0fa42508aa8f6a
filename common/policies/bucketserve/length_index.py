"""Waiting requests by length: the oldest, shortest or longest of any range of lengths in O(log cells).

Lengths fall into cells of equal width (a bucket is a range of cells). A segment tree over the cells keeps per node how
many requests wait below it and which of them is due first; a cell's requests lie in a heap with lazy deletion. So a
bucket never owns a list: splitting and merging buckets moves no request (B5, B11). Owned by `prefill_order.py`, one
index per task class; decides nothing.

Invariant: `count[node]` and `best[node]` equal what a walk over the node's live entries finds; `check()` compares.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf

from cohort.common.errors import InvariantViolated

Entry = tuple[float, int]
"""(due in seconds, serial number): earlier is more urgent, the serial breaks ties and names the request."""

_NOBODY: Entry = (inf, 0)


class LengthIndex:
    def __init__(self, cells: int) -> None:
        leaves = 1
        while leaves < cells:
            leaves *= 2
        self._leaves = leaves
        self._count = [0] * (2 * leaves)
        self._best: list[Entry] = [_NOBODY] * (2 * leaves)
        self._heaps: dict[int, list[Entry]] = {}
        self._dead: set[int] = set()

    def __len__(self) -> int:
        return self._count[1]

    @property
    def oldest(self) -> Entry | None:
        """Due first among all."""
        return self._best[1] if self._count[1] else None

    def add(self, cell: int, entry: Entry) -> None:
        heappush(self._heaps.setdefault(cell, []), entry)
        count, best = self._count, self._best
        node = cell + self._leaves
        while node:
            count[node] += 1
            if entry < best[node]:
                best[node] = entry
            node >>= 1

    def remove(self, cell: int, entry: Entry) -> None:
        """`entry` must be in `cell`."""
        heap = self._heaps[cell]
        if heap[0] == entry:
            heappop(heap)
            while heap and heap[0][1] in self._dead:
                self._dead.discard(heappop(heap)[1])
        else:
            self._dead.add(entry[1])
        count, best = self._count, self._best
        node = cell + self._leaves
        count[node] -= 1
        if len(heap) > 2 * count[node] + 8:  # mostly cancelled: forget them before they pile up
            self._compact(cell)
            heap = self._heaps[cell]
        best[node] = heap[0] if heap else _NOBODY
        if not heap:
            del self._heaps[cell]
        node >>= 1
        while node:
            count[node] -= 1
            left, right = best[2 * node], best[2 * node + 1]
            best[node] = left if left < right else right
            node >>= 1

    def _compact(self, cell: int) -> None:
        live = [entry for entry in self._heaps[cell] if entry[1] not in self._dead]
        self._dead.difference_update(entry[1] for entry in self._heaps[cell])
        heapify(live)
        self._heaps[cell] = live

    def count(self, low: int, high: int) -> int:
        """Requests in cells [low, high)."""
        total = 0
        low, high = low + self._leaves, high + self._leaves
        while low < high:
            if low & 1:
                total += self._count[low]
                low += 1
            if high & 1:
                high -= 1
                total += self._count[high]
            low >>= 1
            high >>= 1
        return total

    def first_due(self, low: int, high: int) -> Entry | None:
        """The most urgent in cells [low, high); None if nobody is there."""
        found = _NOBODY
        best = self._best
        low, high = low + self._leaves, high + self._leaves
        while low < high:
            if low & 1:
                if best[low] < found:
                    found = best[low]
                low += 1
            if high & 1:
                high -= 1
                if best[high] < found:
                    found = best[high]
            low >>= 1
            high >>= 1
        return None if found is _NOBODY else found

    def shortest(self, low: int, high: int) -> Entry | None:
        """The most urgent of the lowest occupied cell in [low, high)."""
        for node in self._cover(low, high):
            if self._count[node]:
                while node < self._leaves:
                    node = 2 * node if self._count[2 * node] else 2 * node + 1
                return self._best[node]
        return None

    def longest(self, low: int, high: int) -> Entry | None:
        """The most urgent of the highest occupied cell in [low, high)."""
        for node in reversed(self._cover(low, high)):
            if self._count[node]:
                while node < self._leaves:
                    node = 2 * node + 1 if self._count[2 * node + 1] else 2 * node
                return self._best[node]
        return None

    def _cover(self, low: int, high: int) -> list[int]:
        """The few nodes that together are [low, high), left to right."""
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
        return left + right[::-1]

    def check(self) -> None:
        """Raises `InvariantViolated` when a node disagrees with the entries below it."""
        for cell in range(self._leaves):
            live = [entry for entry in self._heaps.get(cell, []) if entry[1] not in self._dead]
            node = cell + self._leaves
            if self._count[node] != len(live) or self._best[node] != min(live, default=_NOBODY):
                raise InvariantViolated(f"cell {cell}: counted {self._count[node]}, found {len(live)}")
        for node in range(1, self._leaves):
            left, right = 2 * node, 2 * node + 1
            if self._count[node] != self._count[left] + self._count[right]:
                raise InvariantViolated(f"node {node}: count differs from its children")
            if self._best[node] != min(self._best[left], self._best[right]):
                raise InvariantViolated(f"node {node}: not the first due of its children")
