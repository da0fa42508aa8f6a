"""A reproduced figure: the paper's number, and how ours comes about."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from cohort.services.simulator.report import SimReport


@dataclass(slots=True)
class Lab:
    """Runs simulations once: several figures look at the same run from different sides."""

    _done: dict[Hashable, SimReport] = field(default_factory=dict)

    def run(self, key: Hashable, simulation: Callable[[], SimReport]) -> SimReport:
        if key not in self._done:
            self._done[key] = simulation()
        return self._done[key]


@dataclass(frozen=True, slots=True)
class Figure:
    """One number of a paper and the measurement that answers it. `system` is the preset family it belongs to;
    `baseline` whom the number is about, or against whom."""

    id: str
    system: str
    figure: str
    workload: str
    baseline: str
    metric: str
    unit: str
    paper: float
    measure: Callable[[Lab], float]
    note: str = ""
