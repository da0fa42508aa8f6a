"""When the clock may be believed: expired data is deleted for good, so a clock that jumped must delete nothing.

Called by `batch_runner.py` and `responses_archive.py` before they delete. While wall clock and elapsed time agree, the
clock is as right as when it stamped the files. After a jump nothing can tell which time was wrong: deletions wait until
the clock is back, or has kept its new time for `HOLD_S`, in which it may have been corrected.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

AGREE_S = 3600.0  # wall clock and elapsed time may differ by so much between two looks
HOLD_S = 86_400.0  # that a clock which jumped must keep its new time before it is believed
LONGEST_ABSENCE_S = 7 * 86_400.0  # since the last run; a start that seems later is a jump until it has been kept


@dataclass(frozen=True, slots=True)
class _Anchor:
    wall_s: float
    elapsed_s: float

    def drift_s(self, now: _Anchor) -> float:
        """Return the seconds by which the wall clock moved more than time passed."""
        return (now.wall_s - self.wall_s) - (now.elapsed_s - self.elapsed_s)

    def agrees(self, now: _Anchor) -> bool:
        return abs(self.drift_s(now)) <= AGREE_S


class SweepGuard:
    """`is_plausible` before every sweep. Seconds: `wall_s` since 1970, `elapsed_s` on any clock that runs evenly."""

    def __init__(self, swept_at_s: float | None) -> None:
        """`swept_at_s`: the wall clock at the last sweep of an earlier run, None when there was none."""
        self._swept_at_s = swept_at_s
        self._anchor: _Anchor | None = None
        self._suspect: _Anchor | None = None
        self.jumped_s = 0.0
        """Drift of the clock when it was last doubted."""

    def is_plausible(self, wall_s: float, elapsed_s: float) -> bool:
        now = _Anchor(wall_s, elapsed_s)
        if self._agrees_with_the_past(now):
            self._anchor, self._suspect = now, None
            return True
        if self._suspect is None or not self._suspect.agrees(now):
            self._suspect = now  # a new time: it has to be kept from here on
        if now.elapsed_s - self._suspect.elapsed_s < HOLD_S:
            return False
        self._anchor, self._suspect = now, None
        return True

    def _agrees_with_the_past(self, now: _Anchor) -> bool:
        if self._anchor is not None:
            self.jumped_s = self._anchor.drift_s(now)
            return self._anchor.agrees(now)
        if self._swept_at_s is None:
            return True
        self.jumped_s = now.wall_s - self._swept_at_s
        return -AGREE_S <= self.jumped_s <= LONGEST_ABSENCE_S


def since_boot_s() -> float:
    """Return the seconds of a clock that is never set, with those of a suspended host where the system counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
