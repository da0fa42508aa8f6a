"""A reproduced figure: the paper's number, and how ours comes about."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cohort.services.simulator.core.cluster import SimOptions
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.figures.claim import Kind, Standing
from cohort.services.simulator.figures.kept_runs import KeptRuns


@dataclass(slots=True)
class Lab:
    """Runs simulations of one seed, each once: several figures look at the same run from different sides.

    Whether a figure is a matter of chance is not declared but seen: it is where it, or a run that it looks at, asked
    for the seed. `scatter`: of iterations' times in every run (`scatter.py`). `folder`: where runs are kept, so that
    an interrupted measurement repeats none, nor one of other figures that look at the same runs."""

    chosen_seed: int = 0
    scatter: float | None = None
    folder: Path | None = None
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
            self._done[key] = self._kept(key) or self._ran(key, simulation)
        report, asked = self._done[key]
        self._asked |= asked
        return report

    def _kept(self, key: Hashable) -> tuple[SimReport, bool] | None:
        return self._runs.read(key) if self._runs is not None else None

    def _ran(self, key: Hashable, simulation: Callable[[], SimReport]) -> tuple[SimReport, bool]:
        before, self._asked = self._asked, False
        found = simulation(), self._asked
        self._asked = before
        if self._runs is not None:
            self._runs.write(key, *found)
        return found

    @property
    def _runs(self) -> KeptRuns | None:
        return KeptRuns(self.folder, self.chosen_seed, self.scatter) if self.folder is not None else None

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
    standing: Standing = Standing.CLAIM
    kind: Kind | None = None
    """How it is compared, where neither its claim nor its unit says it."""
    paper_to: float | None = None
    """The other end, where the paper prints a range; `paper` is the one nearer to no effect."""
