"""A10 · How long the engine stands still between two iterations: deciding, building the batch, copies in its way.

The worker loop tells it when rows begin and end; it tells a metric. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class IterationGaps:
    """AlignedServe §4.4: from the last row of an iteration to the first of the next, in seconds.

    Only where the next one was there at once: a worker that waits for work is idle, not slow. Copies that a plan needs
    before its rows, or that outlast the rows they run beside, are in the gap.
    """

    def __init__(self, now_s: Callable[[], float], observe: Callable[[float], None]) -> None:
        self._now_s = now_s
        self._observe = observe
        self._ended_s: float | None = None

    def out_of_work(self) -> None:
        self._ended_s = None

    @contextmanager
    def rows(self) -> Iterator[None]:
        """Around the computing of an iteration's rows, also one that fails."""
        if self._ended_s is not None:
            self._observe(self._now_s() - self._ended_s)
        try:
            yield
        finally:
            self._ended_s = self._now_s()
