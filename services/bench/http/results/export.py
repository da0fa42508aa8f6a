"""The result as files: one JSON document, and one CSV row per request. Called by `__main__` at the end, also after
Ctrl-C."""

from __future__ import annotations

import csv
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from cohort import __version__
from cohort.services.bench.http.load.records import RequestRecord
from cohort.services.bench.http.results.figures import ComparedFigure
from cohort.services.bench.http.results.report import RunReport

if TYPE_CHECKING:
    from cohort.services.bench.http.harness import Measurement

SCHEMA_VERSION = 1


class ClientFacts(msgspec.Struct, frozen=True):
    """The machine that measured."""

    cohort: str = __version__
    python: str = platform.python_version()
    system: str = f"{platform.system()} {platform.machine()}"
    cpus: int = os.cpu_count() or 0


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """The document behind `--json`."""

    schema_version: int = SCHEMA_VERSION
    mode: Literal["single", "compare"]
    client: ClientFacts = ClientFacts()
    settings: dict[str, Any]
    runs: list[RunReport]
    comparison: list[ComparedFigure] | None = None


def to_json(result: BenchResult) -> bytes:
    return msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n"


CSV_COLUMNS = (
    "run",
    "server",
    "index",
    "request_id",
    "class",
    "kind",
    "status",
    "error",
    "due_s",
    "sent_s",
    "first_token_s",
    "end_s",
    "planned_prompt_tokens",
    "prompt_tokens",
    "planned_output_tokens",
    "output_tokens",
    "cached_tokens",
    "chunks",
    "client_queue_ms",
    "ttft_ms",
    "tpot_ms",
    "itl_max_ms",
    "e2e_ms",
)


def write_csv(path: Path, measurements: Sequence[Measurement]) -> None:
    """Figures that do not exist are empty cells, never zeros."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for number, measurement in enumerate(measurements, start=1):
            for record in measurement.records:
                writer.writerow([number, measurement.report.name, *_row(record)])


def _row(record: RequestRecord) -> list[str | int | float | None]:
    plan = record.plan
    gaps = record.itl_s
    return [
        plan.index,
        record.request_id,
        plan.traffic_class,
        plan.group,
        record.status,
        record.error_kind,
        round(record.due_s, 6),
        round(record.sent_s, 6),
        _rounded(record.token_s[0] if record.token_s else None, 6),
        round(record.end_s, 6),
        plan.prompt_tokens,
        record.prompt_tokens,
        plan.output_tokens,
        record.output_tokens,
        record.cached_tokens,
        len(record.token_s),
        round(record.client_queue_s * 1e3, 3),
        _ms(record.ttft_s),
        _ms(record.tpot_s),
        _ms(max(gaps) if gaps else None),
        _ms(record.e2e_s),
    ]


def _ms(value_s: float | None) -> float | None:
    return None if value_s is None else round(value_s * 1e3, 3)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
