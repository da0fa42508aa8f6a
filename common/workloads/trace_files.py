"""Traces that come with Cohort, by name: `configs/traces`, its catalogue, and whether a file is the one listed there.

Called wherever a trace is named: the simulator, comparisons, the benchmark, `cohort traces`. Decides which file a name
means; `traces.py` reads it.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import msgspec

from cohort.common.errors import ConfigError

FOLDER = Path(__file__).resolve().parents[2] / "configs" / "traces"
SUFFIX = ".csv.gz"


class Shipped(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of `traces.yaml`, whose head says what the fields mean."""

    what: str
    source: str
    licence: str
    attribution: str
    sha256: str
    columns: list[str]
    block_tokens: int = 0

    @property
    def has_requests(self) -> bool:
        """Whether its rows are requests; else it is a table from which `servegen.py` draws some."""
        return self.columns[:3] == ["arrival_s", "prompt_tokens", "output_tokens"]


@cache
def shipped() -> Mapping[str, Shipped]:
    """Read the catalogue. Raises `ConfigError`."""
    path = FOLDER / "traces.yaml"
    try:
        return msgspec.yaml.decode(path.read_bytes(), type=dict[str, Shipped])
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}): this installation lacks its traces") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: {error}") from error


def names() -> list[str]:
    """Return the names of shipped traces whose rows are requests."""
    return [name for name, one in shipped().items() if one.has_requests]


@cache
def shipped_file(name: str) -> Path:
    """Return the file of a shipped trace or table once its sum is right. Raises `ConfigError`."""
    path = FOLDER / f"{name}{SUFFIX}"
    try:
        found = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror}): this installation lacks its traces") from error
    if found != shipped()[name].sha256:
        raise ConfigError(f"{path}: not the file that came with Cohort (sha256 {found}); restore it")
    return path


def trace_file(text: str) -> Path | None:
    """Find a trace: a file, else a shipped one by its name (or its file's). None: neither. Raises `ConfigError`."""
    if Path(text).is_file():
        return Path(text)
    name = text.removesuffix(SUFFIX)
    return shipped_file(name) if name in names() else None


def table(name: str) -> list[dict[str, str]]:
    """Read a shipped table, a dictionary by column for each row. Raises `ConfigError`."""
    with gzip.open(shipped_file(name), "rt", encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
