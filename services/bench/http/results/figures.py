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


def _of(get: Callable[[RunReport], Distribution | None], field: str) -> Callable[[RunReport], float | None]:
    def read(report: RunReport) -> float | None:
        found = get(report)
        return None if found is None else float(getattr(found, field))

    return read


def _latency(name: str, title: str, field: str) -> Figure:
    read = _of(lambda run: getattr(run.overall, f"{name}_ms"), field)
    return Figure(f"{name}_{field}_ms", f"{title} {field}", "ms", False, read)


FIGURES: tuple[Figure, ...] = (
    Figure("requests_per_s", "Requests", "1/s", True, lambda run: run.overall.requests_per_s),
    Figure("output_tokens_per_s", "Output tokens", "1/s", True, lambda run: run.overall.output_tokens_per_s),
    Figure("total_tokens_per_s", "All tokens", "1/s", True, lambda run: run.overall.total_tokens_per_s),
    _latency("ttft", "TTFT", "p50"),
    _latency("ttft", "TTFT", "p99"),
    _latency("tpot", "TPOT", "p50"),
    _latency("tpot", "TPOT", "p99"),
    _latency("itl", "ITL", "p50"),
    _latency("itl", "ITL", "p99"),
    _latency("e2e", "e2e", "p50"),
    _latency("e2e", "e2e", "p99"),
    Figure("failed", "Failed requests", "", False, lambda run: float(run.overall.failed)),
    Figure(
        "slo_kept_of_sent",
        "SLO kept, of all sent",
        "%",
        True,
        lambda run: 100.0 * run.overall.slo.kept_of_sent if run.overall.slo else None,
    ),
    Figure(
        "slo_attainment",
        "SLO kept, of completed and failed",
        "%",
        True,
        lambda run: 100.0 * run.overall.slo.attainment if run.overall.slo else None,
    ),
    Figure(
        "goodput_requests_per_s",
        "Goodput",
        "1/s",
        True,
        lambda run: run.overall.slo.goodput_requests_per_s if run.overall.slo else None,
    ),
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
    """The machine that measured."""

    cohort: str = __version__
    python: str = platform.python_version()
    system: str = f"{platform.system()} {platform.machine()}"
    cpus: int = os.cpu_count() or 0


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The document behind `--json`."""

    schema_version: int = 1
    mode: Literal["single", "compare"]
    client: ClientFacts = ClientFacts()
    settings: dict[str, Any]
    runs: list[RunReport]
    comparison: list[ComparedFigure] | None = None


def to_json(result: BenchResult) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"
