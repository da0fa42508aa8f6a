"""Blocking work beside the event loop that is never left half done: copies and sums over memory that is freed next.

Called by links and the transfer agent. The event loop turns meanwhile. A cancelled caller waits until the thread has
let go of the memory, and is cancelled then.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import TypeVar

_T = TypeVar("_T")


async def in_thread(work: Callable[[], _T], executor: Executor | None = None) -> _T:
    """`work()`, in a thread of `executor` (None: the event loop's own); raises what it raises."""
    running = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait((running,))
        if not running.cancelled():
            running.exception()  # the cancellation is what the caller hears
        raise
