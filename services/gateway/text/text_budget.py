"""Bounds the text that is in work at once: tokenised, or built from tokens.

    up to INLINE_BYTES   on the event loop
    up to THREAD_BYTES   in a thread
    beyond               in order, in threads of its own, within MOST_BYTES; 429 when more than MOST_WAITING wait

The library takes about 140 bytes of memory and a microsecond for each byte of hard text, and a thread cannot be
stopped: bytes of a client that left are free when its thread ends, at once if it has not begun. Called by
`tokenizer.py` and `token_api.py`, for every route.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from cohort.common.errors import RequestError

T = TypeVar("T")

INLINE_BYTES = 4096
"""Text that takes about two milliseconds to encode; a thread switch costs a tenth of one."""
THREAD_BYTES = 64 << 10
MOST_BYTES = 4 << 20
"""Text whose encoding takes up to 600 MB of memory. A longer one is in work alone."""
MOST_WAITING = 4 * MOST_BYTES
RETRY_S = 5.0
"""Time in which about `MOST_BYTES` are tokenised."""
TRIM_BYTES = 1 << 20
"""Text after which freed memory goes back to the system: glibc would keep half a gigabyte."""


class TextBudget:
    def __init__(self) -> None:
        self.in_work = 0
        """Bytes of long texts admitted and not yet done."""
        self._line: dict[asyncio.Future[None], int] = {}
        # Half of the processors: the event loop and its other threads go on.
        self._threads = ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // 2), "long texts")
        self._untrimmed = 0

    @property
    def waiting(self) -> int:
        return sum(self._line.values())

    async def run(self, size: int, work: Callable[[], T]) -> T:
        """Run `work` on `size` bytes of text. Raises a 429 `RequestError` while too much waits."""
        if size <= INLINE_BYTES:
            return work()
        if size <= THREAD_BYTES:
            return await asyncio.to_thread(work)
        size = min(size, MOST_BYTES)
        await self._admit(size)
        loop = asyncio.get_running_loop()

        def done(_: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._free, size)

        job = self._threads.submit(work)
        job.add_done_callback(done)  # not the waiter's end, which may precede the thread's
        return await asyncio.wrap_future(job)

    async def _admit(self, size: int) -> None:
        if not self._line and self.in_work + size <= MOST_BYTES:
            self.in_work += size
            return
        if self.waiting + size > MOST_WAITING:
            raise RequestError(
                f"The server is busy: {self.waiting} bytes of long texts wait to be tokenised, of {MOST_WAITING} at "
                f"most; this one has {size}. Please retry later.",
                status=429,
                type_="rate_limit_error",
                retry_after_s=RETRY_S,
            )
        turn = asyncio.get_running_loop().create_future()
        self._line[turn] = size
        try:
            await turn
        except asyncio.CancelledError:
            if self._line.pop(turn, 0):
                self._grant()
            elif not turn.cancelled():
                self._free(size)
            raise

    def _free(self, size: int) -> None:
        self.in_work -= size
        assert self.in_work >= 0, self.in_work
        self._untrimmed += size
        self._grant()
        if not self.in_work and self._untrimmed >= TRIM_BYTES:
            self._untrimmed = 0
            self._threads.submit(_trim)

    def _grant(self) -> None:
        while self._line:
            turn, size = next(iter(self._line.items()))
            if not turn.cancelled():
                if self.in_work + size > MOST_BYTES:
                    return
                self.in_work += size
                turn.set_result(None)
            del self._line[turn]


def byte_length(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _trim() -> None:
    with suppress(AttributeError, OSError):  # other C libraries
        ctypes.CDLL(None).malloc_trim(0)
