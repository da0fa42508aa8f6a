"""The result as one JSON document. Called by `measuring` at the end, also after Ctrl-C."""

from __future__ import annotations

import os
import platform
from typing import Any, Literal

import msgspec

from cohort import __version__
from cohort.services.bench.http.results.figures import ComparedFigure
from cohort.services.bench.http.results.report import RunReport

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
