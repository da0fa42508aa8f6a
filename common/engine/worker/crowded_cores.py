"""Threads of a step on a processor that programs of others use too: fewer while these take the cores of some.

Threads of a step wait for each other in every operator. One whose core a busy program has holds up all of them, and
they spin until it is back: beside two busy programs on two cores, two threads made 1 to 16 tokens a second where one
makes 23.
The kernel tells how long each thread was ready and had no core, and how long cores were idle. Where it does not, as
outside Linux, the number stays what it is.

    look       threads' time without a core       steps so slowed down ──▶ a thread less, or several
    look       idle time of the cores             room for a thread ─────▶ one more; without room, one after a pause
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path

import structlog

log = structlog.get_logger(__name__)

_LOOK_S = 0.25
_ENOUGH_NS = 50_000_000
"""Time for which the calling thread must have been ready between two looks: while requests are few, looks are, too."""
_REST_S = 1.0
"""Time without work after which a look only begins: a request comes with a client that computes, too."""
_SPEEDUP = 0.75
"""N threads make a step N to this power faster: between decode rows, bound by memory, and prompts."""
_SURE = 0.95
"""Share of the best speed from which on the number of threads stays."""
_REMAINDER = 0.6
"""Share of an added thread's core that other programs may use, over the number of cores: less than what takes a thread
away."""
_PAUSE_S, _LONGEST_PAUSE_S = 10.0, 300.0
"""Pause after which a thread more is tried where no core is idle, since programs of less weight give way; twice as long
after each try in vain."""
_LOGGED_EVERY_S = 60.0

Times = dict[int, tuple[int, int]]
"""Nanoseconds on a core, and nanoseconds ready without one, by thread."""


class CrowdedCores:
    """The number of threads for one worker's steps."""

    def __init__(
        self,
        threads: int,
        cores: Collection[int],
        *,
        thread_times: Callable[[], Times] | None = None,
        idle_s: Callable[[Collection[int]], float | None] | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threads`: the most, on `cores`. Cores' idle seconds are a sum since the machine started; None = unknown."""
        self.threads = self._most = threads
        self._cores, self._now_s = cores, now_s
        self._thread_times, self._idle_s = thread_times or own_thread_times, idle_s or idle_core_seconds
        self._look_at_s = self._looked_s = self._logged_s = -math.inf
        self._try_at_s, self._pause_s, self._tried = -math.inf, _PAUSE_S, False
        self._before: Times = {}
        self._idle_before_s: float | None = None

    def look(self) -> int:
        """Return the threads for the next step; at least one. On the thread that computes."""
        now_s = self._now_s()
        if now_s < self._look_at_s or self._most == 1:
            return self.threads
        self._look_at_s = now_s + _LOOK_S
        times = self._thread_times()
        spent = {each: _difference(now, self._before.get(each, now)) for each, now in times.items()}
        if self._before:
            ready_ns = sum(spent.get(threading.get_native_id(), (0, 0)))
            if now_s - self._looked_s - ready_ns / 1e9 <= _REST_S:
                if ready_ns < _ENOUGH_NS:
                    return self.threads
                self._adjust(spent, now_s)
        self._before, self._looked_s = times, now_s
        self._idle_before_s = self._idle_s(self._cores) if self.threads < self._most else None
        assert 1 <= self.threads <= self._most
        return self.threads

    def warning(self) -> str:
        """Return what an operator should know; "" while steps have all their threads."""
        if self.threads == self._most:
            return ""
        return f"other programs use the cores: steps have {self.threads} of {self._most} threads"

    def _adjust(self, spent: Times, now_s: float) -> None:
        # Threads that compute are those that were ready longest.
        computing = sorted(spent.values(), key=sum)[-self.threads :]
        shares = [ran / (ran + waited) for ran, waited in computing if ran + waited]
        wanted, others = self.threads, self._others(sum(shares) / len(shares))
        best = max(range(1, wanted + 1), key=lambda n: self._speed(n, others))
        if self._speed(wanted, others) < _SURE * self._speed(best, others):
            self._pause_s = min(2.0 * self._pause_s, _LONGEST_PAUSE_S) if self._tried else _PAUSE_S
            wanted, self._tried, self._try_at_s = best, False, now_s + self._pause_s
        elif wanted < self._most:
            self._tried = now_s >= self._try_at_s
            if self._tried or self._idle_cores(now_s) >= 1.0 - _REMAINDER / len(self._cores):
                wanted += 1
        if wanted != self.threads:
            self.threads = wanted
            if now_s - self._logged_s >= _LOGGED_EVERY_S:
                log.info("threads of a step changed", threads=wanted, most=self._most, others=round(others, 1))
                self._logged_s = now_s

    def _others(self, share: float) -> float:
        """Return how many programs keep the threads from their cores, which leave each this share of one."""
        return max(0.0, len(self._cores) / max(share, 1e-3) - self.threads)

    def _speed(self, threads: int, others: float) -> float:
        """Return the speed of a step over that of one thread alone: it moves while all its threads have a core."""
        share = min(1.0, len(self._cores) / (threads + others))
        return float(threads**_SPEEDUP * share**threads)

    def _idle_cores(self, now_s: float) -> float:
        idle_s = self._idle_s(self._cores)
        if idle_s is None or self._idle_before_s is None:
            return 0.0
        return (idle_s - self._idle_before_s) / (now_s - self._looked_s)


def _difference(now: tuple[int, int], before: tuple[int, int]) -> tuple[int, int]:
    return now[0] - before[0], now[1] - before[1]


def own_thread_times() -> Times:
    """Return the times of this process's threads; nothing where the kernel does not tell."""
    found: Times = {}
    try:
        for name in os.listdir("/proc/self/task"):
            ran, waited, _ = Path(f"/proc/self/task/{name}/schedstat").read_text(encoding="ascii").split()
            found[int(name)] = int(ran), int(waited)
    except (OSError, ValueError):  # a thread that has ended meanwhile, too: the next look sees the others
        return {}
    return found


def idle_core_seconds(cores: Collection[int]) -> float | None:
    """Return for how long these cores have been idle, or had programs of low priority alone, in sum; None where the
    kernel does not tell."""
    wanted = {f"cpu{core}" for core in cores}
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
        fields = [line.split() for line in lines if line.startswith("cpu")]
        # user, nice, system, idle, iowait: a niced program makes room
        ticks = sum(int(each[2]) + int(each[4]) + int(each[5]) for each in fields if each[0] in wanted)
    except (OSError, ValueError, IndexError):
        return None
    return ticks / os.sysconf("SC_CLK_TCK")
