"""Systems side by side over workloads, loads and seeds: which share of all requests kept their SLOs, with its spread.

    specification (YAML) ─▶ cells: workload × load × seed × system ─▶ a process per core ─▶ results file ─▶ table

Every cell is one run, which the caller measures. Its result is appended to the results file as soon as it is known,
under a digest of all that it depends on: a comparison that was interrupted goes on where it stopped, and one that is
asked again costs nothing. Requests that were refused, or not served before the horizon, count as missed.

The code is not part of the digest: a results file belongs to one version.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import starmap
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from cohort import __version__
from cohort.common.comparison.comparison_spec import Compared, Spec, TrafficSpec
from cohort.common.config import Config, load_config, nested
from cohort.common.errors import ConfigError
from cohort.common.policies import settings

Item = TypeVar("Item")

OUTPUT_RATE = "output tokens/s"
_RATES = {OUTPUT_RATE: "output_tokens_per_s", "prompt tokens/s": "prompt_tokens_per_s", "requests/s": "requests_per_s"}
_TIMES = {
    "TTFT": (("ttft_ms",), ("mean", "p50", "p90", "p99", "max")),
    "TPOT": (("tpot_ms",), ("mean", "p90")),
    "TBT": (("itl_ms", "tbt_ms"), ("p50", "p99", "max")),
    "JCT": (("e2e_ms", "jct_ms"), ("mean", "p99")),
    "normalised latency": (("normalised_ms",), ("mean",)),
}


class Cell(msgspec.Struct, frozen=True):
    """One run: everything that its result depends on, but the code."""

    workload: str
    load: float
    seed: int
    system: str
    traffic: TrafficSpec
    compared: Compared
    model: str
    cluster: str
    duration_s: float
    horizon_s: float
    predictor: str
    predictor_sigma: float
    options: dict[str, Any]
    """Options of the configuration, by name, laid over the preset's."""
    live: bool | UnsetType = UNSET
    variant: int | UnsetType = UNSET
    """Number of the system's variant, from 0."""

    @property
    def label(self) -> str:
        return f"{self.workload} at {self.load:g}, seed {self.seed}: {self.system}"

    @property
    def digest(self) -> str:
        return hashlib.sha256(msgspec.json.encode([__version__, self], order="deterministic")).hexdigest()[:24]


class CellResult(msgspec.Struct, frozen=True):
    """`kept`: the number of the requests `sent` that kept their whole SLO. `numbers`: columns of the run by title.
    Of simulations: `at_most`, how many any scheduler could have kept, None where that is unknown; `longest_wait_s`, in
    virtual time, for a first token, a refusal or the run's end; `groups`, by question and group the requests kept and
    sent."""

    digest: str
    workload: str
    load: float
    seed: int
    system: str
    sent: int
    finished: int
    kept: int
    kept_tokens_per_s: float
    numbers: dict[str, float] = {}
    at_most: float | None = None
    longest_wait_s: float | None = None
    groups: dict[str, dict[str, list[int]]] = {}
    variant: int = 0

    @property
    def share(self) -> float:
        return self.kept / max(1, self.sent)


class Row(msgspec.Struct, frozen=True):
    """A workload at a load: of each system the mean, the lowest and the highest share over the seeds. `at_most`: the
    mean share that any scheduler could have kept, where it is known. `groups`: by question, group and system the share
    kept. `variants`: of the systems that have some, the one shown."""

    workload: str
    load: float
    shares: dict[str, tuple[float, float, float]]
    kept_tokens_per_s: dict[str, float]
    at_most: float | None = None
    longest_wait_s: dict[str, float] = {}
    groups: dict[str, dict[str, dict[str, float]]] = {}
    variants: dict[str, int] = {}


def cells(
    spec: Spec,
    *,
    workloads: Sequence[str] = (),
    systems: Sequence[str] = (),
    loads: Sequence[float] = (),
    seeds: Sequence[int] = (),
    cluster: str = "",
    over: Mapping[str, Any] | None = None,
    live: bool = False,
) -> list[Cell]:
    """Return the cells of the named workloads, systems, loads and seeds; where none is named, of all usual ones.
    `cluster` and the options `over` replace the specification's. Raises `ConfigError`."""
    usual = [name for name, system in spec.systems.items() if system.usual]
    usually = [name for name, workload in spec.workloads.items() if workload.usual is not False]
    found: list[Cell] = []
    checked: set[tuple[str, str, int | UnsetType]] = set()
    for workload in _named("workload", workloads or usually, spec.workloads):
        traffic = spec.workloads[workload]
        for load in loads or traffic.loads or spec.loads:
            for seed in seeds or spec.seeds:
                for system in _named("system", systems or usual, spec.systems):
                    of = spec.systems[system]
                    if (traffic.only and system not in traffic.only) or (live and of.clairvoyant):
                        continue
                    for variant, compared in _variants(of):
                        cell = Cell(
                            workload=workload,
                            load=load,
                            seed=seed,
                            system=system,
                            traffic=traffic,
                            compared=compared,
                            model=traffic.model or spec.model,
                            cluster=cluster or traffic.cluster or spec.cluster,
                            duration_s=traffic.duration_s or spec.duration_s,
                            horizon_s=traffic.horizon_s or spec.horizon_s,
                            predictor=spec.predictor,
                            predictor_sigma=spec.predictor_sigma,
                            options={**spec.set, **traffic.set, **compared.set, **(over or {})},
                            live=live or UNSET,
                            variant=variant,
                        )
                        if (workload, system, variant) not in checked:  # loads and seeds change no option
                            configuration(cell)
                            checked.add((workload, system, variant))
                        found.append(cell)
    return found


def _variants(compared: Compared) -> list[tuple[int | UnsetType, Compared]]:
    if compared.variants is UNSET:
        return [(UNSET, compared)]
    alone = msgspec.structs.replace(compared, variants=UNSET)
    each = [msgspec.structs.replace(alone, set={**compared.set, **options}) for options in compared.variants]
    return list(enumerate(each))


def _named(what: str, names: Sequence[str], known: Mapping[str, Any]) -> Iterable[str]:
    for name in names:
        if name not in known:
            raise ConfigError(f"no {what} named {name!r}; there are: {', '.join(known)}")
    return names or known


def configuration(cell: Cell) -> Config:
    """Load the configuration of a cell and check its settings. Raises `ConfigError`."""
    config = load_config([], preset=cell.compared.preset, overrides=nested(cell.options, cell.label) or None)
    settings.check(config)
    return config


def read_results(path: Path | None) -> dict[str, CellResult]:
    """Read results by digest. Raises `ConfigError`."""
    return {result.digest: result for result in read_lines(path, CellResult, "cohort compare")}


def read_lines(path: Path | None, kind: type[Item], command: str) -> list[Item]:
    """Read a results file; [] where there is none. A half-written last line is cut off. Raises `ConfigError`."""
    if path is None or not path.exists():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if whole != data:
        path.write_bytes(whole)
    decoder, found = msgspec.json.Decoder(kind), []
    for number, line in enumerate(whole.splitlines(), 1):
        try:
            found.append(decoder.decode(line))
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}:{number}: not a result of `{command}`: {error}") from error
    return found


def append_line(path: Path, result: msgspec.Struct) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(result) + b"\n")


def in_processes(jobs: int, function: Callable[..., Item], calls: Iterable[tuple[Any, ...]]) -> Iterator[Item]:
    """Yield the results of the calls as they are done, by `jobs` processes, or in this one if `jobs` is 1."""
    if jobs == 1:
        yield from starmap(function, calls)
        return
    with ProcessPoolExecutor(jobs) as pool:
        waiting = [pool.submit(function, *call) for call in calls]
        try:
            for future in as_completed(waiting):
                yield future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def run(
    requested: Sequence[Cell],
    results: Path | None,
    jobs: int,
    progress: Callable[[str], None],
    measure: Callable[[Cell], CellResult],
) -> list[CellResult]:
    """Return the results of all cells in their order; those in the file are not run again. `measure` must be a function
    of a module, for the other processes of several `jobs`."""
    known = read_results(results)
    missing = [cell for cell in requested if cell.digest not in known]
    progress(f"{len(requested)} runs, {len(requested) - len(missing)} of them known")
    for done, result in enumerate(in_processes(jobs, measure, [(cell,) for cell in missing]), 1):
        known[result.digest] = result
        if results is not None:
            append_line(results, result)
        share = f"{100 * result.share:.1f} % kept"
        if OUTPUT_RATE in result.numbers:
            share += f", {result.numbers[OUTPUT_RATE]:.4g} {OUTPUT_RATE}"
        label = f"{result.workload} at {result.load:g}, seed {result.seed}: {result.system}"
        progress(f"{done}/{len(missing)}  {label}  {share}")
    return [known[cell.digest] for cell in requested]


def columns_of(report: Mapping[str, Any]) -> dict[str, float]:
    """Return a run's columns by title, times in milliseconds. `report` is a live client's or a simulation's, as data:
    both have the same fields, but for the names of two. Columns that a run lacks are left out."""
    found = {title: float(report[field]) for title, field in _RATES.items()}
    if slo := report["slo"]:
        found["kept, %"] = 100 * slo["kept_of_sent"]
    for title, (fields, figures) in _TIMES.items():
        times = next((report[field] for field in fields if report.get(field)), None)
        if times is not None:
            found |= {f"{title} {figure}, ms": times[figure] for figure in figures}
    return found


def rows(results: Iterable[CellResult], tuning_seeds: Sequence[int] = ()) -> list[Row]:
    """Return a row for each workload and load, in the order of the results: of each system's best variant at the tuning
    seeds what it kept at the others, or at all seeds where there are no others."""
    grouped: dict[tuple[str, float], dict[str, list[CellResult]]] = {}
    for result in results:
        grouped.setdefault((result.workload, result.load), {}).setdefault(result.system, []).append(result)
    return [
        _row(workload, load, {name: _judged(of, tuning_seeds) for name, of in systems.items()})
        for (workload, load), systems in grouped.items()
    ]


def _judged(results: Sequence[CellResult], tuning_seeds: Sequence[int]) -> list[CellResult]:
    """Return the best variant's results at the seeds that judge."""
    tuning = [one for one in results if one.seed in tuning_seeds] or results
    shares: dict[int, list[float]] = {}
    for one in tuning:
        shares.setdefault(one.variant, []).append(one.share)
    best = max(shares, key=lambda variant: statistics.fmean(shares[variant]))
    of_best = [one for one in results if one.variant == best]
    return [one for one in of_best if one.seed not in tuning_seeds] or of_best


def _row(workload: str, load: float, systems: Mapping[str, Sequence[CellResult]]) -> Row:
    bounds: dict[int, float] = {}
    for one in (one for results in systems.values() for one in results):
        if one.at_most is not None:
            bounds[one.seed] = max(bounds.get(one.seed, 0.0), one.at_most / max(1, one.sent))
    return Row(
        workload,
        load,
        {name: _spread([one.share for one in of]) for name, of in systems.items()},
        {name: statistics.fmean(one.kept_tokens_per_s for one in of) for name, of in systems.items()},
        statistics.fmean(bounds.values()) if bounds else None,
        {name: max(one.longest_wait_s or 0.0 for one in of) for name, of in systems.items()},
        _groups(systems),
        {name: of[0].variant for name, of in systems.items()},
    )


def _groups(systems: Mapping[str, Sequence[CellResult]]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the share kept, by question, group and system."""
    counts: dict[tuple[str, str, str], tuple[int, int]] = {}
    for system, results in systems.items():
        for one in results:
            for question, of in one.groups.items():
                for group, (kept, sent) in of.items():
                    before = counts.get((question, group, system), (0, 0))
                    counts[question, group, system] = before[0] + kept, before[1] + sent
    found: dict[str, dict[str, dict[str, float]]] = {}
    for (question, group, system), (kept, sent) in counts.items():
        found.setdefault(question, {}).setdefault(group, {})[system] = kept / sent
    return found


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    return statistics.fmean(values), min(values), max(values)
