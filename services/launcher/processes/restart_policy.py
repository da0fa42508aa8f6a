"""Decides whether and when a process that ended is started again. Pure: one object per process, time is an argument.

        start ──▶ running ──(ready)──▶ proven
          ▲          │ ends              │ ends
          │          ▼                   ▼
          └── Restart(delay) ◀───────────┤      at once, or 2 s later where another takes over its work;
                     │                          then 0.2 → 5 s, doubled, until 10 s were healthy
                     │
                     └─▶ GiveUp          never ready so far, and: configuration error (exit code 2), no share of a GPU
                                         left (75), or the 5th end

A worker that was ready, and finds its share of a GPU taken when it comes back, tries again once a minute. A process
that was ready once is never given up: its configuration is good, so the cause of its end may pass.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

SECOND_DELAY_S = 0.2
"""The first restart waits for nothing: the cause that ended a healthy process was most likely outside."""
LONGEST_DELAY_S = 5.0
REPLACED_DELAY_S = 2.0
"""Pause while the worker that takes over computes prompts again: a start takes the cores for seconds, and every step
waits for the slowest core."""
HEALTHY_AFTER_S = 10.0
ATTEMPTS_AT_START = 5
EXIT_CONFIG_ERROR = 2
EXIT_NO_DEVICE = 75  # `service.EXIT_NO_DEVICE`
NO_DEVICE_DELAY_S = 60.0


@dataclass(frozen=True, slots=True)
class Restart:
    delay_s: float
    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    reason: str


class RestartPolicy:
    def __init__(self) -> None:
        self._delay_s = 0.0
        self._failures_at_start = 0
        self._proven = False
        self._ready_since_s: float | None = None

    def started(self) -> None:
        self._ready_since_s = None

    def became_ready(self, now_s: float) -> None:
        self._proven = True
        self._ready_since_s = now_s

    def ended(self, now_s: float, exit_code: int, *, relieved: bool = False) -> Restart | GiveUp:
        """Decide after an end that nobody requested. `exit_code` as subprocess gives it: negative if killed by that
        signal. `relieved`: another process takes over its work."""
        reason = exit_reason(exit_code)
        if not self._proven:
            if exit_code == EXIT_CONFIG_ERROR:
                return GiveUp(f"{reason}: its configuration is wrong")
            if exit_code == EXIT_NO_DEVICE:
                return GiveUp(f"{reason}: every share of every GPU is taken")
            self._failures_at_start += 1
            if self._failures_at_start >= ATTEMPTS_AT_START:
                return GiveUp(f"{reason}: it never became ready in {ATTEMPTS_AT_START} attempts")
        if self._ready_since_s is not None and now_s - self._ready_since_s >= HEALTHY_AFTER_S:
            self._delay_s = 0.0
        delay_s = self._delay_s
        self._delay_s = min(max(2 * delay_s, SECOND_DELAY_S), LONGEST_DELAY_S)
        self._ready_since_s = None
        if exit_code == EXIT_NO_DEVICE:
            return Restart(NO_DEVICE_DELAY_S, f"{reason}: every share of every GPU is taken")
        return Restart(max(delay_s, REPLACED_DELAY_S) if relieved else delay_s, reason)


def exit_reason(exit_code: int) -> str:
    """Describe an exit code, with its most likely cause if there is one."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    hint = " (by hand, or the system ran out of memory)" if name == "SIGKILL" else ""
    return f"killed by {name}{hint}"
