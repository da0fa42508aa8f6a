"""What a simulation of candidate shapes is asked and what it answers; and the workers' own step times as figures of
their heartbeats.

Between the planner's host and whatever simulates: live a process of its own (`services/simulator/advise/foresee.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from cohort.common.planning.shape import Shape
from cohort.common.planning.traffic import Replayed, Timing
from cohort.common.types import StepTimes

_PREFIX = "learned_"


class WorkerCost(msgspec.Struct, frozen=True):
    """Measured figures of a worker of one degree: the time of its iterations, and the blocks of its KV cache."""

    times: StepTimes
    blocks: int
    kv_element_bytes: int = 2

    def paced(self, factor: float) -> WorkerCost:
        """Return the costs with iterations `factor` times as long."""
        times = {name: factor * getattr(self.times, name) for name in StepTimes.__struct_fields__}
        times["mixed_share"] = self.times.mixed_share
        return msgspec.structs.replace(self, times=StepTimes(**times))


class Job(msgspec.Struct, frozen=True):
    """Replay `requests` on each of `shapes`; the first is the present one.

    `costs` by degree. `score` = share served in time, of those from `judged_from` on, - `worker_cost` · devices.
    A shape whose score cannot exceed the first one's by more than `bar`, or that of a later one that was replayed
    before it, is left out.
    `cores`: that workers of `threads` threads each share; 0: each has its own device.
    """

    round: int
    shapes: tuple[Shape, ...]
    requests: tuple[Replayed, ...]
    judged_from: int
    costs: dict[int, WorkerCost]
    worker_cost: float
    bar: float
    best_effort_s: float
    keep: tuple[Shape, ...] = ()
    """Shapes that are replayed in any case."""
    cores: int = 0
    threads: int = 1


class Foreseen(msgspec.Struct, frozen=True):
    """`timings[i]`: of request i on this shape."""

    shape: Shape
    timings: tuple[Timing, ...]


class Answer(msgspec.Struct, frozen=True):
    """`cpu_s`: processor time since the last answer. `failure`: why there is none; "" if there is."""

    round: int
    foreseen: tuple[Foreseen, ...]
    cpu_s: float
    failure: str = ""


def to_stats(times: StepTimes | None) -> dict[str, float]:
    if times is None:
        return {}
    return {f"{_PREFIX}{name}": getattr(times, name) for name in StepTimes.__struct_fields__}


def from_stats(stats: Mapping[str, float]) -> StepTimes | None:
    """Read learned step times from a heartbeat's stats; None before any are learned."""
    try:
        return StepTimes(*(stats[f"{_PREFIX}{name}"] for name in StepTimes.__struct_fields__))
    except KeyError:
        return None
