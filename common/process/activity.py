"""Whether a process has requests, and so how often it does what it does periodically: reports, heartbeats, deadlines.

    worked() ──▶ busy: as usual ──AFTER_S without──▶ quiet: QUIET_S longer between two times
                       ▲──────────────worked()────────────────┘

Each process has one (`ServiceContext.activity`), and its service calls `worked`. A periodic message has the time that
its successor will be late by (`quiet_s`); its receiver counts the sender's silence from then on. What has a deadline
counts as work: a quiet process has none.
"""

from __future__ import annotations

import asyncio
import time

AFTER_S = 5.0
QUIET_S = 3.0


class Activity:
    def __init__(self) -> None:
        self._worked_s = time.monotonic()
        self._woken = asyncio.Event()

    @property
    def quiet_s(self) -> float:
        """Seconds that periodic work may be late now: 0.0 while there are requests, and `AFTER_S` longer."""
        return QUIET_S if time.monotonic() - self._worked_s >= AFTER_S else 0.0

    def worked(self) -> bool:
        """Note that there is work. Return whether the process was quiet: then its pauses become usual ones."""
        was_quiet = self.quiet_s > 0
        self._worked_s = time.monotonic()
        if was_quiet:
            self._woken.set()  # for all that wait
            self._woken.clear()
        return was_quiet

    async def pause(self, usual_s: float, quiet_s: float) -> None:
        """Sleep for the announced `quiet_s`, or until work comes, and for `usual_s` from then on: what is periodic does not
        delay the first request."""
        if quiet_s and self.quiet_s:
            try:
                async with asyncio.timeout(usual_s + quiet_s):
                    await self._woken.wait()
            except TimeoutError:
                return
        await asyncio.sleep(usual_s)
