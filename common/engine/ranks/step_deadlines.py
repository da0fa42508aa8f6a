"""The longest that a step of several ranks may take on the device, whatever its ranks wait for there.

A recorded exchange is a kernel that waits for the other ranks' kernels: where one of them is gone, the wait for the
device never ends, and torch, which watches exchanges that are launched one by one, sees none of a replay. Owned by
`group_steps`. Decides nothing: who made it says what happens to a step that is late.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable


class StepDeadlines:
    """One thread for all steps, from the first one on."""

    def __init__(self, limit_s: float, late: Callable[[], None]) -> None:
        """`late` is called once, on that thread, which then ends."""
        self._limit_s, self._late = limit_s, late
        self._due: dict[int, float] = {}  # in the order of their beginning, and so of their ends
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._asleep = False
        self._thread: threading.Thread | None = None

    def begin(self) -> Callable[[], None]:
        """A step begins. To be called when it is over; again if need be."""
        step = next(self._numbers)
        with self._changed:
            self._due[step] = time.monotonic() + self._limit_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name="step-deadlines", daemon=True)
                self._thread.start()
            elif self._asleep:
                self._changed.notify()

        def over() -> None:
            with self._changed:
                self._due.pop(step, None)

        return over

    def _watch(self) -> None:
        with self._changed:
            while True:
                first = next(iter(self._due.values()), None)
                if first is None:  # woken by the next step; while some run, only every `limit_s`
                    self._asleep = True
                    self._changed.wait()
                    self._asleep = False
                elif (left_s := first - time.monotonic()) > 0:
                    self._changed.wait(left_s)
                else:
                    break
        self._late()
