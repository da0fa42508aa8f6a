"""The headline figures of a run, how several runs of the same thing are put together, and the document of all. Pure.

Called by `measuring` and `render`, so that a table and a comparison name and compute a figure alike.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from cohort import __version__
from cohort.services.bench.http.results.report import Distribution, RunReport
from cohort.services.bench.rounds import Spread, spread


@dataclass(frozen=True, slots=True)
class Figure:
    """`read` gives None where a run has no such figure."""

    key: str
    title: str
    unit: str
    higher_is_better: bool
    read: Callable[[RunReport], float | None]


def _latency(name: str, title: str, field: str) -> Figure:
    def read(report: RunReport) -> float | None:
        found: Distribution | None = getattr(report.overall, f"{name}_ms")
        return None if found is None else float(getattr(found, field))

    return Figure(f"{name}_{field}_ms", f"{title} {field}", "ms", False, read)


def _slo(key: str, title: str, unit: str, field: str, factor: float) -> Figure:
    return Figure(
        key, title, unit, True, lambda run: factor * getattr(run.overall.slo, field) if run.overall.slo else None
    )


FIGURES: tuple[Figure, ...] = (
    Figure("requests_per_s", "Requests", "1/s", True, lambda run: run.overall.requests_per_s),
    Figure("output_tokens_per_s", "Output tokens", "1/s", True, lambda run: run.overall.output_tokens_per_s),
    Figure("total_tokens_per_s", "All tokens", "1/s", True, lambda run: run.overall.total_tokens_per_s),
    *(
        _latency(name, title, field)
        for name, title in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2e", "e2e"))
        for field in ("p50", "p99")
    ),
    Figure("failed", "Failed requests", "", False, lambda run: float(run.overall.failed)),
    _slo("slo_kept_of_sent", "SLO kept, of all sent", "%", "kept_of_sent", 100.0),
    _slo("slo_attainment", "SLO kept, of completed and failed", "%", "attainment", 100.0),
    _slo("goodput_requests_per_s", "Goodput", "1/s", "goodput_requests_per_s", 1.0),
)


class ComparedFigure(msgspec.Struct, frozen=True):
    """`by_name`: spread over the rounds; `ratio_to_first`: of the rounds' own ratios, so that conditions of a round (a
    busy machine) cancel out."""

    key: str
    title: str
    unit: str
    higher_is_better: bool
    by_name: dict[str, Spread]
    ratio_to_first: dict[str, Spread]


def compare(rounds: Mapping[str, Sequence[RunReport]]) -> list[ComparedFigure]:
    """Round i of every name is compared with round i of the first name. Figures that a round lacks are left out."""
    names = list(rounds)
    compared = []
    for figure in FIGURES:
        values = {name: [figure.read(run) for run in rounds[name]] for name in names}
        whole = {name: [v for v in found if v is not None] for name, found in values.items()}
        if any(len(whole[name]) < len(rounds[name]) or not whole[name] for name in names):
            continue
        ratios: dict[str, Spread] = {}
        for name in names[1:]:
            pairs = [b / a for a, b in zip(whole[names[0]], whole[name], strict=False) if a]
            if pairs:
                ratios[name] = spread(pairs)
        compared.append(
            ComparedFigure(
                figure.key,
                figure.title,
                figure.unit,
                figure.higher_is_better,
                {name: spread(whole[name]) for name in names},
                ratios,
            )
        )
    return compared


class ClientFacts(msgspec.Struct, frozen=True):
    cohort: str = __version__
    python: str = platform.python_version()
    system: str = f"{platform.system()} {platform.machine()}"
    cpus: int = os.cpu_count() or 0


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int = 1
    mode: Literal["single", "compare"]
    client: ClientFacts = ClientFacts()
    settings: dict[str, Any]
    runs: list[RunReport]
    comparison: list[ComparedFigure] | None = None


def to_json(result: BenchResult) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
