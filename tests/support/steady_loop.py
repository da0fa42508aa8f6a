"""An event loop whose time stands still while its process is not scheduled: a deadline of a test, or of what runs in
its process, counts the time in which the loop could have done something. A machine that stalls a process for seconds
expires none.

Installed for every test by `conftest.py`. Only the loop's own time is steady (`asyncio.timeout`, `sleep`, `wait_for`,
`call_later`), not `time.monotonic()`, nor what is built on it, unless a test asks for that (`use_loop_time`).
"""

from __future__ import annotations

import asyncio
import selectors
import time
from typing import Any

import pytest

from cohort.common.clock import SystemClock

LONGEST_SELECT_S = 0.05
"""So long a selection waits at most: whoever comes back much later was not scheduled."""
GRACE_S = 0.1


class _SteadySelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Time goes on by what a selection should take at most and by what callbacks take, each with a little grace."""

    def __init__(self) -> None:
        super().__init__()
        self._at_s = self._returned_s = time.monotonic()

    def time(self) -> float:
        return self._at_s + min(time.monotonic() - self._returned_s, GRACE_S)

    def select(self, timeout: float | None = None) -> list[Any]:
        limit_s = LONGEST_SELECT_S if timeout is None else min(max(timeout, 0.0), LONGEST_SELECT_S)
        self._at_s, self._returned_s = self.time(), time.monotonic()
        events = super().select(limit_s)
        now_s = time.monotonic()
        self._at_s += min(now_s - self._returned_s, limit_s + GRACE_S)
        self._returned_s = now_s
        return events


class SteadyLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._steady = _SteadySelector()
        super().__init__(self._steady)

    def time(self) -> float:
        return self._steady.time()


class SteadyPolicy(asyncio.DefaultEventLoopPolicy):
    def new_event_loop(self) -> asyncio.AbstractEventLoop:
        return SteadyLoop()


def use_loop_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a service of this process measures by its clock is steady, too."""
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(SystemClock, "now_s", lambda _: loop.time())
