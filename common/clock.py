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

    now_s = staticmethod(time.monotonic)
    wall_s = staticmethod(time.time)
