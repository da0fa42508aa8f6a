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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path

import msgspec

from cohort import __version__
from cohort.common.errors import ConfigError
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


def digest(figure: Figure, seed: int, scatter: float | None) -> str:
    """Hash what a number depends on. Whether traces are at hand changes workloads."""
    traces = bool(os.environ.get("COHORT_TRACES"))
    parts = [__version__, figure.id, figure.paper, seed, scatter, traces]
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
    known = read_results(results) if results is not None else {}
    digests = {(figure.id, seed): digest(figure, seed, scatter) for figure in figures for seed in seeds}

    def of(figure: Figure, seed: int) -> Measurement | None:
        return known.get(digests[figure.id, seed])

    def run(missing: Mapping[tuple[str, int], list[str]]) -> None:
        for one in _measured(missing, find, results, jobs, scatter):
            known[one.digest] = one
            progress(f"{one.figure}, seed {one.seed}: {one.number:.4g}")

    first = seeds[0]
    run(_units((figure, first) for figure in figures if of(figure, first) is None))
    chancy = [figure for figure in figures if (one := of(figure, first)) is not None and one.chance]
    run(_units((figure, seed) for seed in seeds[1:] for figure in chancy if of(figure, seed) is None))
    found: dict[str, list[Measurement]] = {}
    for figure in figures:
        asked = seeds if figure in chancy else seeds[:1]
        found[figure.id] = [known[digests[figure.id, seed]] for seed in asked]
    return found


def read_results(path: Path) -> dict[str, Measurement]:
    """Read results by digest; none where there is no such file. A half-written last line is cut off. Raises
    `ConfigError`."""
    if not path.exists():
        return {}
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        path.write_bytes(whole)
    found = {}
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            one = msgspec.json.decode(line, type=Measurement)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}:{number}: not a result of `cohort reproduce`: {error}") from error
        found[one.digest] = one
    return found


def _units(wanted: Iterable[tuple[Figure, int]]) -> dict[tuple[str, int], list[str]]:
    """Group ids by system and seed: figures of a system share simulations."""
    units: dict[tuple[str, int], list[str]] = {}
    for figure, seed in wanted:
        units.setdefault((figure.system, seed), []).append(figure.id)
    return units


def _measured(
    units: Mapping[tuple[str, int], list[str]], find: Find, results: Path | None, jobs: int, scatter: float | None
) -> Iterator[Measurement]:
    if jobs == 1 or len(units) == 1:
        for (_, seed), ids in units.items():
            yield from _unit(ids, seed, find, results, scatter)
        return
    with ProcessPoolExecutor(jobs) as pool:
        waiting = [pool.submit(_whole_unit, ids, seed, find, results, scatter) for (_, seed), ids in units.items()]
        try:
            for future in as_completed(waiting):
                yield from future.result()
        finally:
            pool.shutdown(cancel_futures=True)


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
        one = Measurement(digest(figure, seed, scatter), name, seed, value, chance)
        if results is not None:  # by the process that measured: nothing of an unfinished unit is lost
            with results.open("ab") as file:
                file.write(msgspec.json.encode(one) + b"\n")
        yield one
