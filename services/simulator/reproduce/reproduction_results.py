"""Measures the papers' figures with several seeds, and keeps every number as soon as it is known.

    figures × seeds ─▶ units: a system and a seed, whose figures share simulations ─▶ processes ─▶ results file

A results file holds a line for each figure and seed under a digest of what it depends on but the code, and the folder
beside it (`FILE.runs`) every simulation: what was interrupted goes on where it stopped. Figures that chance has no part
in (`Lab.measured`) run with the first seed only.
Called by `reproduce`.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import starmap
from pathlib import Path

import msgspec

from cohort import __version__
from cohort.common.comparison.comparison import append_line, in_processes, read_lines
from cohort.services.simulator.figures.figure import Figure, Lab

Progress = Callable[[str], None]
Find = Callable[[str], Figure]
"""A figure by its id; figures themselves hold functions and stay in their process."""


class Measurement(msgspec.Struct, frozen=True):
    """One figure's number with one seed. `value` null: not finite. `chance`: the seed had a part in it."""

    digest: str
    figure: str
    seed: int
    value: float | None
    chance: bool

    @property
    def number(self) -> float:
        return math.nan if self.value is None else self.value


def digest(figure: Figure, seed: int) -> str:
    """Hash what a number depends on. Whether traces are at hand changes workloads."""
    parts = [__version__, figure.id, figure.paper, seed, bool(os.environ.get("COHORT_TRACES"))]
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:24]


def measure_all(
    figures: Sequence[Figure], seeds: Sequence[int], find: Find, *, results: Path | None, jobs: int, progress: Progress
) -> dict[str, list[Measurement]]:
    """Return each figure's measurements in the order of the seeds; one where chance has no part in it."""
    known = read_results(results)
    digests = {(figure.id, seed): digest(figure, seed) for figure in figures for seed in seeds}

    def of(figure: Figure, seed: int) -> Measurement | None:
        return known.get(digests[figure.id, seed])

    def run(missing: Iterable[tuple[Figure, int]]) -> None:
        units: dict[tuple[str, int], list[str]] = {}
        for figure, seed in missing:  # figures of a system share simulations
            units.setdefault((figure.system, seed), []).append(figure.id)
        calls = [(ids, seed, find, results) for (_, seed), ids in units.items()]
        beside = jobs > 1 and len(calls) > 1
        for of_unit in in_processes(jobs, _whole_unit, calls) if beside else starmap(_unit, calls):
            for one in of_unit:
                known[one.digest] = one
                progress(f"{one.figure}, seed {one.seed}: {one.number:.4g}")

    first = seeds[0]
    run((figure, first) for figure in figures if of(figure, first) is None)
    chancy = [figure for figure in figures if (one := of(figure, first)) is not None and one.chance]
    run((figure, seed) for seed in seeds[1:] for figure in chancy if of(figure, seed) is None)
    found: dict[str, list[Measurement]] = {}
    for figure in figures:
        asked = seeds if figure in chancy else seeds[:1]
        found[figure.id] = [known[digests[figure.id, seed]] for seed in asked]
    return found


def read_results(path: Path | None) -> dict[str, Measurement]:
    """Read results by digest. Raises `ConfigError`."""
    return {one.digest: one for one in read_lines(path, Measurement, "cohort reproduce")}


def _whole_unit(ids: Sequence[str], seed: int, find: Find, results: Path | None) -> list[Measurement]:
    return list(_unit(ids, seed, find, results))


def _unit(ids: Sequence[str], seed: int, find: Find, results: Path | None) -> Iterator[Measurement]:
    lab = Lab(seed, results.with_name(f"{results.name}.runs") if results is not None else None)
    for name in ids:
        figure = find(name)
        number, chance = lab.measured(figure.measure)
        value = number if math.isfinite(number) else None
        one = Measurement(digest(figure, seed), name, seed, value, chance)
        if results is not None:  # by the process that measured: nothing of an unfinished unit is lost
            append_line(results, one)
        yield one
