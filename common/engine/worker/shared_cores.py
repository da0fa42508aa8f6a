"""Threads of a step on a processor whose cores several workers share: all, or a share while others compute too.

    worker a   step ─ step ─ step                its slot: computes until 12.3 s
    worker b        weights, warm-up, step …     reads the slot: one thread of two, until that time has passed

Two threads that wait for each other in every operator are slow beyond measure beside two others: a thread spins through
its time slice while its partner has none, and a step of 60 ms took 1.2 s. With one thread for each nobody waits.
Where a position's bits do not depend on the number of threads (ADR 14 has the exceptions), answers do not change.

Slots are times in a file of the pipeline's run folder, mapped by all its workers. They run out by themselves, so a
worker that was killed or stopped takes nobody's cores; one from before the machine's restart, whose clock began anew,
lies too far ahead to be anybody's.
"""

from __future__ import annotations

import asyncio
import mmap
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from cohort.common.engine.worker.crowded_cores import CrowdedCores

_SLOTS = 32
_BYTES = 8 * _SLOTS
_LASTS_S, _RENEWED_S = 0.25, 0.05
"""Time for which a slot holds, and after which it is renewed: an event loop may be late by the difference."""


class SharedCores:
    """One worker's view of the cores; two names may share a slot, and then do not see each other."""

    def __init__(
        self,
        file: Path,
        instance: str,
        *,
        threads: int,
        cores: int,
        crowded: CrowdedCores | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threads`: this worker's while nobody else computes, of `cores`. `file` is made if it is missing. `crowded`:
        what programs that are no workers leave of the cores; None = all."""
        with file.open("a+b") as opened:
            if opened.seek(0, 2) < _BYTES:
                opened.truncate(_BYTES)
            self._slots = memoryview(mmap.mmap(opened.fileno(), _BYTES)).cast("d")
        self._own = zlib.crc32(instance.encode()) % _SLOTS
        self._threads, self._cores, self._crowded, self._now_s = threads, cores, crowded, now_s
        self._computing = 0
        self._timer: asyncio.TimerHandle | None = None

    def share(self) -> int:
        """Return the threads to compute with now; at least one. From any thread."""
        now_s = self._now_s()
        computing = [0.0 < until_s - now_s < 2 * _LASTS_S for until_s in self._slots]
        others = sum(computing) - computing[self._own]
        return self._threads if not others else max(1, min(self._threads, self._cores // (1 + others)))

    def step_threads(self) -> int:
        """Return the threads for the next step. On the thread that computes it."""
        return self.share() if self._crowded is None else min(self.share(), self._crowded.look())

    def begin(self) -> None:
        """Say that this worker computes, until as many calls of `end`. On the event loop, as `end`."""
        self._computing += 1
        if self._timer is None:
            self._renew()

    def end(self) -> None:
        self._computing -= 1

    @contextmanager
    def computing(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        finally:
            self.end()

    def _renew(self) -> None:
        self._timer = None
        if self._computing:
            self._slots[self._own] = self._now_s() + _LASTS_S
            self._timer = asyncio.get_running_loop().call_later(_RENEWED_S, self._renew)
        else:
            self._slots[self._own] = 0.0
