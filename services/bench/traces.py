"""Reads workload traces: Mooncake JSONL, Azure CSV, BurstGPT CSV and our normalised CSV, plain or gzip.

Called by `workload`'s builder. Decides what a row means and refuses what it cannot read, naming file and line. Never
clips or scales: that is the workload's business and is stated in its facts.
"""

from __future__ import annotations

import csv
import gzip
import io
import math
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TextIO, get_args

import msgspec

from cohort.common.errors import ConfigError

TraceFormat = Literal["mooncake", "azure", "burstgpt", "cohort"]
TRACE_FORMATS: tuple[TraceFormat, ...] = get_args(TraceFormat)

_HEADERS: Mapping[TraceFormat, frozenset[str]] = {
    "azure": frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
    "burstgpt": frozenset({"Timestamp", "Request tokens", "Response tokens"}),
    "cohort": frozenset({"arrival_s", "prompt_tokens", "output_tokens"}),
}


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. `arrival_s` None: a list of lengths without times. `hash_ids`: equal leading ids = shared prefix."""

    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    session: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """`rows` in order of arrival, the first at second 0; `skipped_rows` had no prompt or no output (failed
    requests)."""

    format: TraceFormat
    rows: tuple[TraceRow, ...]
    skipped_rows: int

    @property
    def arrival_s(self) -> list[float] | None:
        times = [row.arrival_s for row in self.rows]
        return None if any(t is None for t in times) else [t for t in times if t is not None]


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path, trace_format: TraceFormat | None = None, limit: int | None = None) -> Trace:
    """The first `limit` usable rows. The format is recognised by the first line unless named."""
    rows: list[TraceRow] = []
    skipped = 0
    with open_text(path) as file:
        try:
            found, numbered = _rows(path, file, trace_format)
            for line, row in numbered:
                if row.prompt_tokens < 0 or row.output_tokens < 0:
                    raise ConfigError(f"{path}:{line}: token counts must not be negative")
                if row.prompt_tokens == 0 or row.output_tokens == 0:
                    skipped += 1
                    continue
                if rows and (row.arrival_s is None) != (rows[0].arrival_s is None):
                    raise ConfigError(f"{path}:{line}: either every row has an arrival time or none has")
                rows.append(row)
                if limit is not None and len(rows) >= limit:
                    break
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text ({error.reason})") from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ConfigError(f"{path}: damaged gzip file ({error})") from error
        except csv.Error as error:
            raise ConfigError(f"{path}: not a CSV file ({error})") from error
    if not rows:
        raise ConfigError(f"{path}: no row with a prompt and an output")
    return Trace(found, _from_zero(rows), skipped)


def open_text(path: Path) -> TextIO:
    """The file as UTF-8 text; gzip is recognised by its first bytes, not by its name."""
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        if packed:
            return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8-sig", newline="")
        return path.open(encoding="utf-8-sig", newline="")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error


def _from_zero(rows: list[TraceRow]) -> tuple[TraceRow, ...]:
    """In order of arrival (stable), the first at 0."""
    if rows[0].arrival_s is None:
        return tuple(rows)
    rows = sorted(rows, key=lambda row: row.arrival_s or 0.0)
    first_s = rows[0].arrival_s or 0.0
    return tuple(
        TraceRow((row.arrival_s or 0.0) - first_s, row.prompt_tokens, row.output_tokens, row.hash_ids, row.session)
        for row in rows
    )


def _rows(
    path: Path, file: TextIO, wanted: TraceFormat | None,
) -> tuple[TraceFormat, Iterator[tuple[int, TraceRow]]]:
    first = file.readline()
    if not first.strip():
        raise ConfigError(f"{path}:1: the first line is empty")
    if wanted == "mooncake" or (wanted is None and first.lstrip().startswith("{")):
        return "mooncake", _mooncake(path, first, file)
    columns = [name.strip() for name in next(csv.reader([first]))]
    for name, needed in _HEADERS.items():
        if wanted in (None, name) and needed <= set(columns):
            return name, _csv_rows(path, file, columns, name)
    if wanted is not None:
        missing = ", ".join(sorted(_HEADERS[wanted] - set(columns)))
        raise ConfigError(f"{path}:1: {'an' if wanted == 'azure' else 'a'} {wanted} trace needs the columns {missing}")
    raise ConfigError(
        f"{path}:1: not a known trace. Known: Mooncake JSONL; CSV with the columns "
        + "; or ".join(", ".join(sorted(needed)) for needed in _HEADERS.values())
    )


def _mooncake(path: Path, first: str, file: TextIO) -> Iterator[tuple[int, TraceRow]]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for line, text in enumerate(_chain(first, file), start=1):
        if not text.strip():
            continue
        try:
            row = decoder.decode(text)
        except msgspec.MsgspecError as error:
            raise ConfigError(f"{path}:{line}: not a Mooncake row: {error}") from error
        yield line, TraceRow(row.timestamp / 1000.0, row.input_length, row.output_length, tuple(row.hash_ids))


def _chain(first: str, rest: TextIO) -> Iterator[str]:
    yield first
    yield from rest


def _csv_rows(path: Path, file: TextIO, columns: list[str], kind: TraceFormat) -> Iterator[tuple[int, TraceRow]]:
    reader = csv.reader(file)
    for cells in reader:
        line = reader.line_num + 1  # the header was read before the reader started
        if not cells:
            continue
        if len(cells) < len(columns):
            raise ConfigError(f"{path}:{line}: {len(cells)} of {len(columns)} columns")
        row = dict(zip(columns, cells, strict=False))
        try:
            yield line, _csv_row(row, kind)
        except ValueError as error:
            raise ConfigError(f"{path}:{line}: {error}") from error


def _csv_row(row: Mapping[str, str], kind: TraceFormat) -> TraceRow:
    match kind:
        case "azure":
            return TraceRow(
                _utc_s(row["TIMESTAMP"]),
                _tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens"),
            )
        case "burstgpt":
            return TraceRow(
                _seconds(row["Timestamp"]), _tokens(row, "Request tokens"), _tokens(row, "Response tokens"),
                session=row.get("Session ID", "").strip(),
            )
        case "cohort":
            arrival = row["arrival_s"].strip()
            return TraceRow(
                _seconds(arrival) if arrival else None, _tokens(row, "prompt_tokens"), _tokens(row, "output_tokens"),
                tuple(int(part) for part in row.get("hash_ids", "").split()), row.get("session", "").strip(),
            )
        case "mooncake":
            raise AssertionError("Mooncake traces are JSON lines, not CSV")


def _seconds(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is not a time")
    return value


def _utc_s(text: str) -> float:
    """A time stamp without a zone counts as UTC, so that no daylight-saving jump falls into a trace."""
    moment = datetime.fromisoformat(text.strip())
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _tokens(row: Mapping[str, str], column: str) -> int:
    """A count; some exports write whole numbers as floats ("12.0")."""
    text = row[column].strip()
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"column {column!r}: {text!r} is not a number") from None
    if not number.is_integer():
        raise ValueError(f"column {column!r}: {text!r} is not a whole number of tokens")
    return int(number)
