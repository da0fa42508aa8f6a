"""The results of a live comparison: runs as they were measured, and their rounds put together. Read and written as
JSON.

Written after every run, so that an interruption loses none, and so that a comparison can be made in several sittings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from cohort.common.errors import ConfigError
from cohort.services.bench.output import markdown_table
from cohort.services.bench.spread import Spread, spread


class Run(msgspec.Struct, frozen=True):
    """One system under one load in one round. A value that does not exist is None."""

    load: str
    system: str
    round: int
    values: dict[str, float | None]


class Summary(msgspec.Struct, frozen=True):
    """One system under one load over its rounds; a column that no round has is left out."""

    load: str
    system: str
    rounds: int
    values: dict[str, Spread]


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """The document behind `--json`."""

    schema_version: int = 1
    mode: str = "live"
    spec: str
    parameters: dict[str, float | str]
    settings: list[str]
    runs: list[Run]
    summary: list[Summary] = []

    def encode(self) -> bytes:
        whole = msgspec.structs.replace(self, summary=list(summarise(self.runs)))
        return msgspec.json.format(msgspec.json.encode(whole), indent=1) + b"\n"


def run_of(load: str, system: str, round_: int, values: Mapping[str, float]) -> Run:
    existing = {title: None if math.isnan(value) else value for title, value in values.items()}
    return Run(load, system, round_, existing)


def read_results(path: Path) -> Results:
    """The results of an earlier sitting. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Results)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: not the results of a live comparison: {error}") from error


def summarise(runs: Sequence[Run]) -> Iterator[Summary]:
    """In the order in which loads and systems first come."""
    for load, system in dict.fromkeys((run.load, run.system) for run in runs):
        rounds = [run.values for run in runs if (run.load, run.system) == (load, system)]
        values = {}
        for title in dict.fromkeys(title for round_ in rounds for title in round_):
            existing = [value for round_ in rounds if (value := round_.get(title)) is not None]
            if existing:
                values[title] = spread(existing)
        yield Summary(load, system, len(rounds), values)


def table(runs: Sequence[Run]) -> str:
    """Medians over the rounds, with the smallest and the largest where there are several. Markdown."""
    titles = list(dict.fromkeys(title for run in runs for title in run.values))
    rows = [
        [each.load, each.system, str(each.rounds), *(_cell(each.values.get(title)) for title in titles)]
        for each in summarise(runs)
    ]
    return markdown_table(["load", "system"], ["rounds", *titles], rows)


def _cell(value: Spread | None) -> str:
    if value is None:
        return "–"
    if len(value.values) == 1 or value.min == value.max:
        return f"{value.median:.4g}"
    return f"{value.median:.4g} ({value.min:.4g} to {value.max:.4g})"
