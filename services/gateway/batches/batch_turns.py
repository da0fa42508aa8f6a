"""Whose turn it is: how many lines of batches may be in work, so that batches fill what online requests leave.

Called by `batch_runner.py` around every line. A running line is never taken back: workers' policies do that.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Turns:
    """Limit of `limit` lines at a time, or of `busy_limit` while an online request waits. Turns go in order of arrival,
    so that concurrent batches advance alike."""

    def __init__(self, limit: int, busy_limit: int, online_waiting: Callable[[], int], changed: asyncio.Event) -> None:
        """`changed` is set, also by others, when there may be a turn."""
        self._limit = limit
        self._busy_limit = min(limit, busy_limit)
        self._online_waiting = online_waiting
        self._queue = asyncio.Lock()
        self._changed = changed
        self.taken = 0
        self._limited: Counter[str] = Counter()
        self._freed = asyncio.Event()

    async def take(self) -> None:
        """Wait for a turn, which the caller must `give_back`."""
        async with self._queue:
            while self.taken >= (self._busy_limit if self._online_waiting() else self._limit):
                self._changed.clear()
                await self._changed.wait()
            self.taken += 1

    def give_back(self) -> None:
        self.taken -= 1
        self._changed.set()

    async def free(self, owner: str) -> None:
        """Wait until no line of this owner waits for a limit of its key, which the next one would do too."""
        while self._limited[owner]:
            self._freed.clear()
            await self._freed.wait()

    @contextmanager
    def waiting(self, owner: str) -> Iterator[None]:
        """Give a line's turn away while it waits for its key's limit. It returns then, even beyond the limit."""
        self._limited[owner] += 1
        self.give_back()
        try:
            yield
        finally:
            self.taken += 1
            self._limited[owner] -= 1
            self._freed.set()
