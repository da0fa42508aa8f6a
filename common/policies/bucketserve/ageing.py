"""Order in which waiting requests are due: class, priority and age in one number that never changes.

All requests grow more urgent at the same pace, so the order of two requests is fixed when they arrive, and a heap needs
no refresh. Nothing starves: all requests that arrive after a request's due time are due after it.
"""

from __future__ import annotations

from cohort.common.types import Request

_SERIAL_BITS = 48
SERIAL = (1 << _SERIAL_BITS) - 1
"""`entry & SERIAL` is the entry's serial number."""

_LEVELS = 100
"""Greatest priority that counts: a client's number must not buy an unbounded head start."""


def due_s(request: Request, *, priority_step_s: float, offline_delay_s: float) -> float:
    """B6, B10 · Return the time at which this request is as urgent as an online one of priority 0 that arrives then.

    BucketServe §III: the longest waiting go first, online work before offline, higher priorities (lower numbers here)
    before lower ones. The paper gives no weights: here a level is worth `priority_step_s` of waiting, and offline
    requests wait `offline_delay_s` longer.
    """
    level = min(_LEVELS, max(-_LEVELS, request.priority))
    return request.arrival_s + level * priority_step_s + (0.0 if request.online else offline_delay_s)


def entry_of(due_s: float, serial: int) -> int:
    """Return one number that sorts as the pair: `due_s` to a nanosecond, ties broken by `serial` (below 2⁴⁸): it is
    compared faster than a tuple."""
    return (int(due_s * 1e9) << _SERIAL_BITS) + serial
