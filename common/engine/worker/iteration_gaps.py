"""A10 · Idle time of the engine between two iterations: deciding, building the batch, copies in its way.

Called when rows begin and end, by the threads that launch and await them; observes a metric.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock


class IterationGaps:
    """AlignedServe §4.4: Seconds from the last row of an iteration to the first of the next. Only where the next one
    was there at once: a worker that waits for work is idle, not slow. Copies that a plan needs before its rows, or that
    outlast the rows they run beside, are in the gap."""

    def __init__(self, now_s: Callable[[], float], observe: Callable[[float], None]) -> None:
        self._now_s = now_s
        self._observe = observe
        self._lock = Lock()
        self._ended_s: float | None = None
        self._running = 0

    def out_of_work(self) -> None:
        with self._lock:
            self._ended_s = None

    def on_start(self) -> None:
        """Record that an iteration's rows are given to the device. No gap if those before them still run."""
        with self._lock:
            if self._running:
                self._observe(0.0)
            elif self._ended_s is not None:
                self._observe(self._now_s() - self._ended_s)
            self._running += 1

    def on_end(self) -> None:
        with self._lock:
            self._running -= 1
            self._ended_s = self._now_s()
