"""The work of simulated instances, and the cost of deciding on the machine that simulated."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from cohort.common.machines.worker.worker_state import WorkerCounters


@dataclass(slots=True)
class WallTime:
    """Measured wall-clock time of machines: the cost of scheduling, not part of virtual time."""

    calls: int = 0
    seconds: float = 0.0

    @property
    def mean_us(self) -> float:
        return self.seconds / max(1, self.calls) * 1e6


def timed(handle: Callable[..., Any], wall: WallTime) -> Callable[..., Any]:
    clock = time.perf_counter

    def measured(now_s: float, *events: Any) -> Any:
        started = clock()
        effects = handle(now_s, *events)
        wall.seconds += clock() - started
        wall.calls += 1
        return effects

    return measured


@dataclass(slots=True)
class WorkerTally:
    """The work of one instance since counting began. `before`: the machine's own counters at that moment."""

    steps: int = 0
    busy_s: float = 0.0
    flops: float = 0.0
    rows: int = 0
    useful_tokens: int = 0
    padded_tokens: int = 0
    swapped_bytes: int = 0
    decode_steps: int = 0
    mixed_steps: int = 0
    drafting_s: float = 0.0
    """A draft model's part of busy_s."""
    kv_samples: int = 0
    kv_used_sum: float = 0.0
    kv_used_peak: float = 0.0
    kv_filled_sum: float = 0.0
    before: WorkerCounters = field(default_factory=WorkerCounters)
    failures_before: int = 0

    @staticmethod
    def begin(counters: WorkerCounters, allocation_failures: int) -> WorkerTally:
        return WorkerTally(before=replace(counters), failures_before=allocation_failures)
