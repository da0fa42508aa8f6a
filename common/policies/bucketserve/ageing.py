"""In which order waiting requests are due: class, priority and age in one number that never changes.

Every request grows more urgent at the same pace, so a request that leads now leads later: the order of two requests is
fixed when they arrive, and a heap needs no refresh. Nothing starves: a request is preceded only by requests due before
it, and all that arrive later than its own due time are due after it.
"""

from __future__ import annotations

from cohort.common.types import Request

_SERIAL_BITS = 48
"""More requests than a manager will see."""
SERIAL = (1 << _SERIAL_BITS) - 1
"""`entry & SERIAL` is the entry's serial number."""

_LEVELS = 100
"""Priorities beyond ±100 count as that: a client's number must not buy an unbounded head start."""


def due_s(request: Request, *, priority_step_s: float, offline_delay_s: float) -> float:
    """B6, B10 · when this request becomes as urgent as an online one of priority 0 that arrives then, in seconds.

    BucketServe §III: requests that have waited longest go first, online work before offline, higher priorities
    first (a lower number here). One level is worth `priority_step_s` of waiting, being offline costs
    `offline_delay_s`. Differs from the paper: it names the three preferences but not how they are weighed.
    """
    level = min(_LEVELS, max(-_LEVELS, request.priority))
    return request.arrival_s + level * priority_step_s + (0.0 if request.online else offline_delay_s)


def entry_of(due_s: float, serial: int) -> int:
    """Both in one number that sorts as the pair does: `due_s` to a nanosecond, ties broken by `serial` (below 2⁴⁸).

    A tuple would be three objects to look at in every comparison instead of one.
    """
    return (int(due_s * 1e9) << _SERIAL_BITS) + serial
