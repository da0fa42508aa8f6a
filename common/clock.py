"""Time as a dependency: services read a `Clock`, pure code gets `now_s` as an argument.

`wall_s` stamps what leaves the process (arrival times, logs); `now_s` is monotonic and measures intervals.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float: ...

    def wall_s(self) -> float: ...


class SystemClock:
    """The machine's own clocks. CLOCK_MONOTONIC is one clock for all processes of a host."""

    def now_s(self) -> float:
        return time.monotonic()

    def wall_s(self) -> float:
        return time.time()


class VirtualClock:
    """A clock that moves only when told; the simulator's and the tests'."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def wall_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time cannot run backwards ({seconds} s)")
        self._now_s += seconds
