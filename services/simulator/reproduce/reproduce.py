"""The papers' figures beside ours: chosen, measured with several seeds, and reported as rows with their verdicts.

    figures × seeds ─▶ units: a system and a seed, whose figures share simulations ─▶ processes ─▶ results file

A results file holds a line for each figure and seed under a digest of what it depends on but the code, and the folder
beside it (`FILE.runs`) every simulation: what was interrupted goes on where it stopped. Figures that chance has no part
in (`Lab.measured`) run with the first seed only. `verdicts` judges, `reproduction_page` writes docs/reproduction.md.
"""

from __future__ import annotations

import hashlib
import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import starmap
from pathlib import Path

import msgspec

from cohort import __version__
from cohort.common.comparison.comparison import append_line, in_processes, read_lines
from cohort.common.errors import ConfigError
from cohort.services.simulator.figures.figure import Figure, Kind, Lab
from cohort.services.simulator.reproduce.verdicts import Spread, kind_of, row_verdict

Progress = Callable[[str], None]
Find = Callable[[str], Figure]
"""A figure by its id; figures themselves hold functions and stay in their process."""

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
    exercised: float | None = None
    """Median percentage of requests that used the mechanism."""

    @classmethod
    def of(
        cls, figure: Figure, values: Sequence[float], seeds: Sequence[int], exercised: Sequence[float] = ()
    ) -> Reproduced:
        """Make a row. `values` in the figure's unit; one, and no seeds, where chance has no part in it."""
        found = Spread.of(values, deterministic=not seeds, exercised=exercised)
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
            exercised=found.exercised,
        )

    @property
    def spread(self) -> Spread:
        return Spread(self.low, self.ours, self.high, len(self.seeds), self.exercised)


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
    scatter: float | None = None,
) -> list[Reproduced]:
    """Measure the figures. Raises `ConfigError` if `results` is not a results file."""
    chosen = list(figures)
    named = {figure.id: figure for figure in chosen}
    of_id = find if jobs > 1 else named.__getitem__
    found = measure_all(chosen, seeds, of_id, results=results, jobs=jobs, scatter=scatter, progress=progress)
    rows = []
    for figure in chosen:
        measured = found[figure.id]
        values, drawn = [one.number for one in measured], [one.seed for one in measured if one.chance]
        exercised = [one.exercised for one in measured if one.exercised is not None]
        rows.append(Reproduced.of(figure, values, drawn, exercised))
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


# -- measuring ----------------------------------------------------------------------------------------------------


class Measurement(msgspec.Struct, frozen=True):
    """One figure's number with one seed. `value` null: not finite. `chance`: the seed had a part in it."""

    digest: str
    figure: str
    seed: int
    value: float | None
    chance: bool
    exercised: float | None = None

    @property
    def number(self) -> float:
        return math.nan if self.value is None else self.value


def digest(figure: Figure, seed: int, scatter: float | None) -> str:
    """Hash what a number depends on."""
    parts = [__version__, figure.id, figure.paper, seed, scatter]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:24]


def measure_all(
    figures: Sequence[Figure],
    seeds: Sequence[int],
    find: Find,
    *,
    results: Path | None,
    jobs: int,
    scatter: float | None,
    progress: Progress,
) -> dict[str, list[Measurement]]:
    """Return each figure's measurements in the order of the seeds; one where chance has no part in it."""
    known = read_results(results)
    digests = {(figure.id, seed): digest(figure, seed, scatter) for figure in figures for seed in seeds}

    def of(figure: Figure, seed: int) -> Measurement | None:
        return known.get(digests[figure.id, seed])

    def run(missing: Iterable[tuple[Figure, int]]) -> None:
        units: dict[tuple[str, int], list[str]] = {}
        for figure, seed in missing:  # figures of a system share simulations
            units.setdefault((figure.system, seed), []).append(figure.id)
        calls = [(ids, seed, find, results, scatter) for (_, seed), ids in units.items()]
        parallel = jobs > 1 and len(calls) > 1
        for of_unit in in_processes(jobs, _whole_unit, calls) if parallel else starmap(_unit, calls):
            for one in of_unit:
                known[one.digest] = one
                progress(f"{one.figure}, seed {one.seed}: {one.number:.4g}")

    first = seeds[0]
    run((figure, first) for figure in figures if of(figure, first) is None)
    chancy = [figure for figure in figures if (one := of(figure, first)) is not None and one.chance]
    run((figure, seed) for seed in seeds[1:] for figure in chancy if of(figure, seed) is None)
    found: dict[str, list[Measurement]] = {}
    for figure in figures:
        used = seeds if figure in chancy else seeds[:1]
        found[figure.id] = [known[digests[figure.id, seed]] for seed in used]
    return found


def read_results(path: Path | None) -> dict[str, Measurement]:
    """Read results by digest. Raises `ConfigError`."""
    return {one.digest: one for one in read_lines(path, Measurement, "cohort reproduce")}


def _whole_unit(
    ids: Sequence[str], seed: int, find: Find, results: Path | None, scatter: float | None
) -> list[Measurement]:
    return list(_unit(ids, seed, find, results, scatter))


def _unit(
    ids: Sequence[str], seed: int, find: Find, results: Path | None, scatter: float | None
) -> Iterator[Measurement]:
    lab = Lab(seed, scatter, results.with_name(f"{results.name}.runs") if results is not None else None)
    for name in ids:
        figure = find(name)
        number, chance = lab.measured(figure.measure)
        value = number if math.isfinite(number) else None
        exercised = lab.measured(figure.exercised)[0] if figure.exercised is not None else None
        one = Measurement(digest(figure, seed, scatter), name, seed, value, chance, exercised)
        if results is not None:  # by the process that measured: nothing of an unfinished unit is lost
            append_line(results, one)
        yield one
