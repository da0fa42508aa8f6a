"""Waits that a cancellation does not cut short: for copies and sums over memory that is freed next.

Called by links and the transfer agent. A cancelled caller waits until nothing uses the memory, and is cancelled then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, TypeVar

_T = TypeVar("_T")
_FOREVER_S = 1e9


async def in_thread(work: Callable[[], _T], executor: Executor | None = None) -> _T:
    """Run `work` in a thread of `executor` (None: the event loop's own); raises what it raises."""
    running = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await outlast(running)
        if not running.cancelled():
            running.exception()  # retrieved: the caller gets the cancellation instead
        raise


async def outlast(future: asyncio.Future[Any], timeout_s: float = _FOREVER_S) -> None:
    """Wait until a future is done or the time is over. A cancelled caller, which is leaving already, waits as long."""
    until_s = time.monotonic() + timeout_s
    while not future.done() and (remaining_s := until_s - time.monotonic()) > 0:
        with suppress(asyncio.CancelledError):
            await asyncio.wait((future,), timeout=remaining_s)
