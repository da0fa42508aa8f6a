"""The papers' figures beside ours: chosen, measured with several seeds, and told as rows with their verdicts.

`reproduction_results` measures, `verdicts` judges, `reproduction_page` writes docs/reproduction.md from the same rows.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import msgspec

from cohort.common.errors import ConfigError
from cohort.services.simulator.figures.figure import Figure, Kind
from cohort.services.simulator.reproduce.reproduction_results import Progress, measure_all
from cohort.services.simulator.reproduce.verdicts import Spread, kind_of, row_verdict

MODULES = ("baselines", "bucketserve", "alignedserve", "dynaserve", "ecoserve", "bros")
"""Modules of `figures/`, in the order in which they run."""


class Reproduced(msgspec.Struct, frozen=True):
    """`ours`: the median of `values`, which are in the order of `seeds`; `ratio` is of the paper's number. No seeds:
    chance has no part in it, and it was measured once. What is not finite is null in JSON."""

    id: str
    system: str
    figure: str
    workload: str
    baseline: str
    metric: str
    unit: str
    paper: float
    shown_paper: str
    """Printed number, with the other end of a range, or what it bounds."""
    ours: float
    low: float
    high: float
    ratio: float
    verdict: str
    note: str
    seeds: list[int]
    values: list[float]

    @classmethod
    def of(cls, figure: Figure, values: Sequence[float], seeds: Sequence[int]) -> Reproduced:
        """Make a row. `values`: what was measured, in the figure's unit; one, and no seeds, where chance has no part in
        it."""
        found = Spread.of(values, deterministic=not seeds)
        same = ("id", "system", "figure", "workload", "baseline", "metric", "unit", "paper", "note")
        return cls(
            **{name: getattr(figure, name) for name in same},
            shown_paper=shown_paper(figure),
            ours=found.median,
            low=found.low,
            high=found.high,
            ratio=ratio_of(figure, found.median),
            verdict=row_verdict(kind_of(figure), figure.paper, found, figure.paper_to),
            seeds=list(seeds),
            values=list(values),
        )

    @property
    def spread(self) -> Spread:
        return Spread(self.low, self.ours, self.high, len(self.seeds))


@cache
def all_figures() -> tuple[Figure, ...]:
    found: list[Figure] = []
    for name in MODULES:
        found += importlib.import_module(f"cohort.services.simulator.figures.{name}").FIGURES
    return tuple(found)


def conditions(system: str) -> list[str]:
    """Return the conditions under which a system's figures are measured, from its module."""
    if system not in MODULES:
        return []
    return list(getattr(importlib.import_module(f"cohort.services.simulator.figures.{system}"), "CONDITIONS", ()))


def find(name: str) -> Figure:
    """Find a figure by id: for other processes."""
    return next(figure for figure in all_figures() if figure.id == name)


def select(system: str | None, prefix: str | None) -> list[Figure]:
    """Choose figures. Raises `ConfigError` when nothing is left."""
    figures = all_figures()
    chosen = [
        figure
        for figure in figures
        if (system is None or figure.system == system.lower()) and figure.id.startswith(prefix or "")
    ]
    if not chosen:
        systems = ", ".join(sorted({figure.system for figure in figures}))
        raise ConfigError(f"no such figure; systems: {systems}; `cohort reproduce --list` names all")
    return chosen


def reproduce(
    figures: Iterable[Figure],
    progress: Progress,
    seeds: Sequence[int] = (0,),
    *,
    results: Path | None = None,
    jobs: int = 1,
) -> list[Reproduced]:
    """Measure the figures. Raises `ConfigError` if `results` is not a results file."""
    chosen = list(figures)
    named = {figure.id: figure for figure in chosen}
    of_id = find if jobs > 1 else named.__getitem__
    found = measure_all(chosen, seeds, of_id, results=results, jobs=jobs, progress=progress)
    rows = []
    for figure in chosen:
        measured = found[figure.id]
        chance = measured[0].chance
        rows.append(
            Reproduced.of(figure, [one.number for one in measured], [one.seed for one in measured] if chance else [])
        )
    return rows


def ratio_of(figure: Figure, ours: float) -> float:
    """Return our number over the paper's, of a range over the end that is nearer. NaN where the paper prints none."""
    papers = [figure.paper] if figure.paper_to is None else [figure.paper, figure.paper_to]
    if kind_of(figure) in (Kind.MORE, Kind.LESS) or not all(papers):
        return math.nan
    if min(papers) <= ours <= max(papers) and len(papers) > 1:
        return 1.0
    return min((ours / paper for paper in papers), key=lambda ratio: abs(ratio - 1.0))


def shown_paper(figure: Figure) -> str:
    if math.isnan(figure.paper):
        return "–"
    words = {Kind.AT_MOST: "at most ", Kind.AT_LEAST: "at least ", Kind.MORE: "above ", Kind.LESS: "below "}
    to = "" if figure.paper_to is None else f" to {figure.paper_to:g}"
    return f"{words.get(kind_of(figure), '')}{figure.paper:g}{to}"


def shown_spread(found: Spread) -> str:
    if not found.seeds:
        return "no chance in it"
    if found.seeds == 1 or math.isnan(found.median):
        return "one seed" if found.seeds == 1 else f"{found.seeds} seeds"
    return f"{found.low:.4g} to {found.high:.4g}, {found.seeds} seeds"
