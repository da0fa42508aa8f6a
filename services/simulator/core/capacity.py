"""Capacity: the highest request rate that a cluster keeps up with, for as long as one likes, while it keeps its SLOs.

    rate ─▶ arrivals for a warm-up, a window and what follows it ─▶ kept: share of the window's requests with an SLO
                                                                    served: answers over requests of a window
    a rate holds if kept ≥ target and served ≥ 0.97; the search doubles, halves, then bisects

A burst is no rate: a window lasts at least two minutes, twenty mean times of a request and two hundred requests, and
the same traffic goes on until all that it has sent are answered. Answers are counted in a window of the same length, a
mean time of a request later, as every answer comes that much after its request: with queues that neither grow nor
shrink both hold as many. A run ends once it is clear that a rate does not hold. What was served is compared with the
roofline of the requests that were (`roofline.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import msgspec

from cohort.common.config import Config
from cohort.common.policies.cost_model import ModelShape
from cohort.common.types import Role
from cohort.common.workloads.items import WorkItem
from cohort.services.simulator.core import roofline
from cohort.services.simulator.core.clients import InFlight, has_slo
from cohort.services.simulator.core.cluster import SimCluster
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.core.traffic import Traffic
from cohort.services.simulator.hardware.hardware import Cluster

WINDOW_S, MEAN_TIMES, REQUESTS = 120.0, 20.0, 200
SERVED = 0.97
_WARM_UP = 0.15
"""Share of a window that comes before it: three mean times of a request."""
_BEYOND = 0.25
"""Share of a window for which traffic goes on after it at most: five mean times."""
_LONGER = 1.2
"""Factor on a window that turned out too short, as a longer one has longer mean times."""
_USUAL_PART = 0.4
"""Share of the roofline at which a search without any other start begins: near what simulated systems reach."""


class Point(msgspec.Struct, frozen=True):
    """One rate. `served`: answers over requests. `window_s`, `mean_s`: length of the window, mean time of a request.
    `broken_off`: the run ended early, as the rate could not hold any more; its figures are those until then."""

    rate_per_s: float
    kept: float
    served: float = 1.0
    window_s: float = 0.0
    mean_s: float = 0.0
    broken_off: bool = False

    def holds(self, target: float) -> bool:
        return self.kept >= target and self.served >= SERVED


class Capacity(msgspec.Struct, frozen=True):
    """Highest rate tried that holds, 0 without any; `tried` in the order of the search."""

    target: float
    rate_per_s: float
    tried: list[Point]


def find_capacity(
    at_rate: Callable[[float], Point], start_per_s: float, target: float, *, tolerance: float = 0.04
) -> Capacity:
    """Double or halve from `start_per_s` until the capacity is bracketed, then bisect to `tolerance` of the rate.

    Assumes that a rate above one that does not hold does not hold, which is true up to noise; the noise is the same at
    every rate because a rate only scales the pattern of arrivals.
    """
    tried: list[Point] = []

    def holds(rate: float) -> bool:
        tried.append(at_rate(rate))
        return tried[-1].holds(target)

    good, bad = 0.0, float("inf")
    rate = start_per_s
    for _ in range(12):
        if holds(rate):
            good = max(good, rate)
            rate *= 2
        else:
            bad = min(bad, rate)
            rate /= 2
        if good and bad < float("inf"):
            break
        if good == 0.0 and len(tried) > 8:
            return Capacity(target, 0.0, tried)
    while bad < float("inf") and bad - good > tolerance * bad:
        middle = (good + bad) / 2
        if holds(middle):
            good = middle
        else:
            bad = middle
    return Capacity(target, good, tried)


@dataclass(frozen=True)
class Load:
    """A set-up and its traffic, whose rate may rise."""

    config: Config
    cluster: Cluster
    model: ModelShape
    traffic: Traffic
    options: SimOptions
    roles: Mapping[Role, int] | None = None

    def capacity(self, start_per_s: float | None, target: float, *, tolerance: float = 0.04) -> Capacity:
        """Search the capacity. Raises `ConfigError`, `BeyondRoofline`."""
        start = start_per_s or self.start_per_s()
        return find_capacity(lambda rate: self.point(rate, target), start, target, tolerance=tolerance)

    def start_per_s(self) -> float:
        """Return where a search may begin."""
        return _USUAL_PART * self.bound(self.traffic.sample())

    def point(self, rate_per_s: float, target: float) -> Point:
        """Measure one rate, for as long as a point must last. Raises `ConfigError`, `BeyondRoofline`."""
        window_s = max(WINDOW_S, REQUESTS / rate_per_s)
        while True:
            window = _Window(self, rate_per_s, window_s, target)
            point = window.measured()
            needed_s = MEAN_TIMES * point.mean_s
            if not point.holds(target) or window_s >= needed_s:
                label = f"{self.config.name}, {self.model.name} on {self.cluster.name} at {rate_per_s:.4g} requests/s"
                if answered := window.answered:
                    roofline.check(len(answered) / window_s, self.bound(answered), label)
                return point
            window_s = _LONGER * needed_s

    def bound(self, items: list[WorkItem]) -> float:
        """Return the roofline of such requests, in requests a second."""
        drafts = bool(self.options.acceptance or self.options.draft_rates)
        return roofline.roofline(self.model, self.cluster, self.config, items, drafts=drafts)


class _Known(Exception):
    """Signal that more of a run would show no more."""


class _Window:
    """One run, watched: requests that arrive within the window, and the times of all answers."""

    def __init__(self, load: Load, rate_per_s: float, window_s: float, target: float) -> None:
        self._rate_per_s, self._length_s = rate_per_s, window_s
        self._from_s = _WARM_UP * window_s
        self._to_s = self._from_s + window_s
        workload = load.traffic.lasting(self._to_s + _BEYOND * window_s).workload(rate_per_s)
        judged = [item for item in workload.items if self._from_s <= item.arrival_s < self._to_s]
        self._sent = len(judged)
        self._with_slo = sum(has_slo(item) for item in judged)
        self._may_miss = (1.0 - target) * self._with_slo
        self._kept = self._missed = self._ended = self._finished = 0
        self._sum_s = 0.0
        self._seen = False
        """Whether the window of answers is over."""
        self._answers: list[tuple[float, WorkItem]] = []
        """Every answer's last token and its request."""
        options = replace(load.options, horizon_s=float("inf"), warmup_s=0.0)
        self._sim = SimCluster(load.config, load.cluster, load.model, workload, options, load.roles)
        self._sim.clients.on_end = self._on_end

    def measured(self) -> Point:
        known = False
        try:
            self._sim.run()
        except _Known:
            known = True
        kept = self._kept / self._with_slo if self._with_slo else 1.0  # what has no end is late
        broken_off = known and self._ended < self._sent
        return Point(self._rate_per_s, kept, self._served(), self._length_s, self._mean_s, broken_off)

    @property
    def answered(self) -> list[WorkItem]:
        """Requests that were answered within the window of answers."""
        since_s = self._from_s + self._mean_s
        return [item for end_s, item in self._answers if since_s <= end_s < since_s + self._length_s]

    @property
    def _mean_s(self) -> float:
        return self._sum_s / self._finished if self._finished else 0.0

    def _served(self) -> float:
        return min(1.0, len(self.answered) / self._sent) if self._sent else 1.0

    def _on_end(self, live: InFlight, finished: bool) -> None:
        item, kept = live.item, finished and all(live.attained)
        if finished:
            self._answers.append((live.last_s, item))
        if self._from_s <= item.arrival_s < self._to_s:
            self._ended += 1
            self._finished += finished
            self._sum_s += live.last_s - item.arrival_s if finished else 0.0
            if has_slo(item):
                self._kept += kept
                self._missed += not kept
        if self._missed > self._may_miss:
            raise _Known
        if self._sim.events.now_s < self._to_s + self._mean_s:
            return
        seen, self._seen = self._seen, True
        if self._ended == self._sent or (not seen and self._served() < SERVED):
            raise _Known
