"""Bounds the text that is in work at once: tokenised, or built from tokens.

    up to INLINE_BYTES   on the event loop, without coming here
    up to THREAD_BYTES   in a thread
    beyond               in threads of its own, within MOST_BYTES, in turn of the keys: the one whose texts have had the
                         fewest bytes goes next (`FairQueue`); 429 when more than MOST_WAITING of a key would wait

The library takes about 140 bytes of memory and a microsecond for each byte of hard text, and a thread cannot be
stopped: bytes of a client that left are free when its thread ends, at once if it has not begun. Called by
`tokenizer.py` and `token_api.py`, for every route.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from cohort.common.devices.cores import usable_cores
from cohort.common.errors import busy
from cohort.common.policies.fair_queue import FairQueue
from cohort.common.types import RequestId

T = TypeVar("T")

INLINE_BYTES = 4096
"""Text that takes about two milliseconds to encode; a thread switch costs a tenth of one."""
THREAD_BYTES = 64 << 10
MOST_BYTES = 4 << 20
"""Text whose encoding takes up to 600 MB of memory. A longer one is in work alone."""
MOST_WAITING = 4 * MOST_BYTES  # of one key
RETRY_S = 5.0
"""Time in which about `MOST_BYTES` are tokenised."""
TRIM_BYTES = 1 << 20
"""Text after which freed memory goes back to the system: glibc would keep half a gigabyte."""


@dataclass(slots=True, eq=False)
class _Turn:
    owner: str
    size: int
    granted: asyncio.Future[None]


class TextBudget:
    def __init__(self) -> None:
        self.in_work = 0
        """Bytes of long texts admitted and not yet done."""
        self.waiting_of: Counter[str] = Counter()
        """Bytes that wait, by owner."""
        self._line: dict[RequestId, _Turn] = {}
        self._fair = FairQueue()
        self._head: RequestId | None = None
        """Text whose turn it is, while it is too large for what is left."""
        self._arrived = self._running = 0
        # Half of the processors: the event loop and its other threads go on.
        self._most_running = max(1, usable_cores() // 2)
        self._threads = ThreadPoolExecutor(self._most_running, "long texts")
        self._untrimmed = 0

    async def run(self, size: int, work: Callable[[], T], owner: str = "") -> T:
        """Run `work` on `size` bytes of text. Raises a 429 `RequestError` while too much of the owner's waits."""
        if size <= THREAD_BYTES:
            return await asyncio.to_thread(work)
        size = min(size, MOST_BYTES)
        await self._admit(size, owner)
        loop = asyncio.get_running_loop()

        def done(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._free, size)

        job = self._threads.submit(work)
        job.add_done_callback(done)  # not the waiter's end, which may precede the thread's
        return await asyncio.wrap_future(job)

    async def _admit(self, size: int, owner: str) -> None:
        if (waiting := self.waiting_of[owner]) + size > MOST_WAITING:
            raise busy(
                f"The server is busy: {waiting} bytes of this client's long texts wait to be tokenised, of "
                f"{MOST_WAITING} at most; this one has {size}. Please retry later.",
                RETRY_S,
            )
        self._arrived += 1
        name, turn = str(self._arrived), _Turn(owner, size, asyncio.get_running_loop().create_future())
        self._line[name] = turn
        self.waiting_of[owner] += size
        self._fair.add(owner, name, rank=self._arrived, cost=size)
        self._grant()
        try:
            await turn.granted
        except asyncio.CancelledError:
            if not turn.granted.cancelled():
                self._free(size)
            elif name in self._line:
                self._leave(name)
                self._grant()
            raise

    def _free(self, size: int) -> None:
        self.in_work -= size
        self._running -= 1
        assert self.in_work >= 0 <= self._running, (self.in_work, self._running)
        self._untrimmed += size
        self._grant()
        if not self.in_work and self._untrimmed >= TRIM_BYTES:
            self._untrimmed = 0
            self._threads.submit(_trim)

    def _grant(self) -> None:
        while self._running < self._most_running and (name := self._head or self._fair.next()):
            self._head, turn = name, self._line[name]
            if not turn.granted.cancelled():
                if self.in_work + turn.size > MOST_BYTES:
                    return
                self.in_work += turn.size
                self._running += 1
                turn.granted.set_result(None)
            self._leave(name)

    def _leave(self, name: RequestId) -> None:
        turn = self._line.pop(name)
        if not self._fair.remove(name):  # its turn has come
            self._head = None
            if turn.granted.cancelled():
                self._fair.give_back(turn.owner, turn.size)
        self.waiting_of[turn.owner] -= turn.size
        assert self.waiting_of[turn.owner] >= 0, self.waiting_of
        if not self.waiting_of[turn.owner]:
            del self.waiting_of[turn.owner]


def _trim() -> None:
    with suppress(AttributeError, OSError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)
