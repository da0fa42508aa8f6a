"""Whether a process has requests, and so how often it does what it does periodically: reports, heartbeats, deadlines.

    work is set ──▶ busy: as usual ──AFTER_S without──▶ quiet: QUIET_S longer between two times
                        ▲───────────────work is set─────────────┘

Each process has one (`ServiceContext.activity`), and its service sets `work`. A periodic message has the time that its
successor will be late by (`quiet_s`); its receiver counts the sender's silence from then on. What has a deadline counts
as work: a quiet process has none.
"""

from __future__ import annotations

import asyncio
import time

AFTER_S = 5.0
QUIET_S = 4.0


class Activity:
    def __init__(self) -> None:
        self.work = asyncio.Event()
        """Event: there is a request. Cleared here, so that requests which go on set it again."""
        self._worked_s = time.monotonic()

    def quiet_s(self) -> float:
        """Return the seconds that periodic work may be late now: 0.0 while there are requests, and `AFTER_S` longer."""
        now_s = time.monotonic()
        if self.work.is_set():
            self.work.clear()
            self._worked_s = now_s
        return QUIET_S if now_s - self._worked_s >= AFTER_S else 0.0

    async def pause(self, usual_s: float, quiet_s: float) -> None:
        """Sleep for the announced `quiet_s` or until there is work, and then for `usual_s`: what is periodic does not
        delay the first request."""
        if quiet_s and self.quiet_s():
            try:
                async with asyncio.timeout(usual_s + quiet_s):
                    await self.work.wait()
            except TimeoutError:
                return
        await asyncio.sleep(usual_s)
