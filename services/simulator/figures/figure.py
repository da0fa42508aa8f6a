"""A reproduced figure: the paper's number, and how ours comes about."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from cohort.services.simulator.cluster import SimOptions
from cohort.services.simulator.report import SimReport


@dataclass(slots=True)
class Lab:
    """Runs simulations of one seed, each once: several figures look at the same run from different sides.

    Whether a figure is a matter of chance is not declared but seen: it is where it, or a run that it looks at, asked
    for the seed. `scatter`: of iterations' times in every run (`scatter.py`)."""

    chosen_seed: int = 0
    scatter: float | None = None
    _done: dict[Hashable, tuple[SimReport, bool]] = field(default_factory=dict)
    _asked: bool = False

    @property
    def seed(self) -> int:
        """Of workloads and of everything else that is drawn in a run."""
        self._asked = True
        return self.chosen_seed

    def options(self, **given: Any) -> SimOptions:
        """Of a simulation with this seed, and with what was asked for all of them."""
        return SimOptions(seed=self.seed, scatter=self.scatter, **given)

    def run(self, key: Hashable, simulation: Callable[[], SimReport]) -> SimReport:
        if key not in self._done:
            before, self._asked = self._asked, False
            report = simulation()
            self._done[key] = report, self._asked
            self._asked = before
        report, asked = self._done[key]
        self._asked |= asked
        return report

    def measured(self, measure: Callable[[Lab], float]) -> tuple[float, bool]:
        """The number, and whether the seed had a part in it."""
        self._asked = False
        return float(measure(self)), self._asked


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
    told: bool = True
    """False: no verdict. The paper prints no number of its own for it, or it is wall time of the simulating machine."""
