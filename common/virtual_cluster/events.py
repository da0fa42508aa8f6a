"""The clock and the events to come: a heap of (time, rank, order of scheduling, what to do).

Two events of the same moment happen by rank, then in the order in which they were scheduled, so a run depends on its
inputs and seed only. Ranks keep that order the same however early an event was foreseen.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Events:
    def __init__(self, start_s: float = 0.0) -> None:
        self.now_s = start_s
        self.handled = 0
        self._heap: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0

    def at(self, time_s: float, action: Callable[..., None], *arguments: Any, rank: int = 0) -> None:
        """A time that has passed means now."""
        self._scheduled += 1
        at_s = time_s if time_s > self.now_s else self.now_s
        heapq.heappush(self._heap, (at_s, rank, self._scheduled, action, arguments))

    def run(self, until_s: float, done: Callable[[], bool]) -> None:
        """Until nothing is left, `done` says so, or the next event is later than `until_s`."""
        heap = self._heap
        while heap and heap[0][0] <= until_s and not done():
            self.now_s, _, _, action, arguments = heapq.heappop(heap)
            self.handled += 1
            action(*arguments)
