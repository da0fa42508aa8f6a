"""Reads workload traces: Mooncake JSONL, Azure CSV, BurstGPT CSV, our normalised CSV; writes the last.

Plain or gzip. Called by the simulator, the benchmark and `cohort traces`. Decides what a row means and refuses what it
cannot read, naming file, line and field. Never clips or scales: that is the workload's business and is stated in its
facts.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import math
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, TextIO

import msgspec

from cohort.common.errors import ConfigError

TraceFormat = Literal["mooncake", "azure", "burstgpt", "cohort"]
_HEADERS: Mapping[TraceFormat, frozenset[str]] = {
    "azure": frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}),
    "burstgpt": frozenset({"Timestamp", "Request tokens", "Response tokens"}),
    "cohort": frozenset({"arrival_s", "prompt_tokens", "output_tokens"}),
}
_LENGTHS = ("arrival_s", "prompt_tokens", "output_tokens")
MORE = ("hash_ids", "session", "adapter")
"""Columns of our format that a trace need not have."""
_LONGEST_LINE = 1 << 20
"""Characters of a line: a file without line ends must not fill the memory."""
_MOST_TOKENS = 1 << 31
_HASH_BLOCKS = tuple(1 << power for power in range(16))


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request. `arrival_s` None: a list of lengths without times. `hash_ids`: equal leading ids = shared prefix."""

    arrival_s: float | None
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()
    session: str = ""
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """`rows` in order of arrival, the first at second 0; `skipped_rows`: without prompt or output (failed requests)."""

    format: TraceFormat
    rows: tuple[TraceRow, ...]
    skipped_rows: int

    @property
    def arrival_s(self) -> list[float] | None:
        times = [row.arrival_s for row in self.rows]
        return None if any(t is None for t in times) else [t for t in times if t is not None]

    def hash_block(self) -> int:
        """Infer the tokens per hash id: the power of two with which every row has an id for each full block of its
        prompt, or for each begun one, too. 0 without ids. Raises `ConfigError` when none fits.

        Of several that fit the largest is taken: the blocks of a trace with short prompts only cannot be told apart.
        """
        hashed = [row for row in self.rows if row.hash_ids]
        if not hashed:
            return 0
        for block in reversed(_HASH_BLOCKS):
            rounded_up = all(len(row.hash_ids) == -(-row.prompt_tokens // block) for row in hashed)
            if rounded_up or all(len(row.hash_ids) == row.prompt_tokens // block for row in hashed):
                return block
        raise ConfigError("hash_ids: no power of two of tokens per id fits all rows; say how many there are")


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(
    path: Path, trace_format: TraceFormat | None = None, limit: int | None = None, *, sort: bool = False
) -> Trace:
    """Read the first `limit` usable rows. The format is recognised by the first line unless named.

    Arrivals must not go backwards unless `sort` allows it (stable by time). Raises `ConfigError`.
    """
    with open_trace(path, trace_format, sort=sort) as reader:
        rows = list(itertools.islice(reader, limit))
    return Trace(reader.format, _from_zero(rows), reader.skipped_rows)


@dataclass(slots=True)
class TraceReader:
    """One pass over the usable rows of a file, one in memory at a time. `skipped_rows`: left out so far, without prompt
    or output. `columns`: those beyond times and lengths that the rows fill. Iterating raises `ConfigError`."""

    path: Path
    format: TraceFormat
    columns: tuple[str, ...]
    numbered: Iterator[tuple[int, TraceRow]]
    sort: bool = False
    skipped_rows: int = 0

    def __iter__(self) -> Iterator[TraceRow]:
        before: TraceRow | None = None
        for line, row in self.numbered:
            if row.prompt_tokens == 0 or row.output_tokens == 0:
                self.skipped_rows += 1
                continue
            if before is not None:
                self._check_times(line, before.arrival_s, row.arrival_s)
            before = row
            yield row
        if before is None:
            raise ConfigError(f"{self.path}: no row with a prompt and an output")

    def _check_times(self, line: int, before_s: float | None, arrival_s: float | None) -> None:
        if (before_s is None) != (arrival_s is None):
            raise ConfigError(
                f"{self.path}:{line}: column 'arrival_s': either every row has an arrival time or none has"
            )
        if before_s is not None and arrival_s is not None and arrival_s < before_s and not self.sort:
            raise ConfigError(
                f"{self.path}:{line}: the arrival time {arrival_s:g} is before {before_s:g} of the row before it"
            )


@contextmanager
def open_trace(path: Path, trace_format: TraceFormat | None = None, *, sort: bool = False) -> Iterator[TraceReader]:
    """Open a trace; see `read_trace`. Raises `ConfigError`."""
    with _reading(path) as file:
        found, columns, numbered = _rows(path, _lines(path, file), trace_format)
        yield TraceReader(path, found, tuple(name for name in MORE if name in columns), numbered, sort)


def write_trace(rows: Iterable[TraceRow], file: TextIO, more: Sequence[str] = MORE) -> int:
    """Write rows in our format, the columns `more` of `MORE` beside times and lengths; return their number. The first
    row is at second 0, times are rounded to microseconds."""
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow((*_LENGTHS, *more))
    first_s, count = 0.0, 0
    for count, row in enumerate(rows, start=1):
        if count == 1:
            first_s = row.arrival_s or 0.0
        due = "" if row.arrival_s is None else f"{row.arrival_s - first_s:.6f}".rstrip("0").rstrip(".")
        known = {"hash_ids": " ".join(map(str, row.hash_ids)), "session": row.session, "adapter": row.adapter}
        writer.writerow((due, row.prompt_tokens, row.output_tokens, *(known[name] for name in more)))
    return count


@contextmanager
def _reading(path: Path) -> Iterator[TextIO]:
    """Open the file as UTF-8 text. Gzip is recognised by its first bytes, not by its name. Raises `ConfigError`."""
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        binary = gzip.open(path, "rb") if packed else path.open("rb")  # noqa: SIM115  # closed with `file`
        file = io.TextIOWrapper(binary, encoding="utf-8-sig", newline="")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror or error})") from error
    with file:
        try:
            yield file
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8 text ({error.reason})") from error
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise ConfigError(f"{path}: damaged gzip file ({error})") from error


def _lines(path: Path, file: TextIO) -> Iterator[str]:
    for line in itertools.count(1):
        text = file.readline(_LONGEST_LINE + 1)
        if len(text) > _LONGEST_LINE:
            raise ConfigError(f"{path}:{line}: longer than {_LONGEST_LINE:,} characters: not a trace")
        if not text:
            return
        yield text


def _from_zero(rows: list[TraceRow]) -> tuple[TraceRow, ...]:
    """Sort rows by arrival (stable), the first at 0."""
    if rows[0].arrival_s is None:
        return tuple(rows)
    rows = sorted(rows, key=lambda row: row.arrival_s or 0.0)
    first_s = rows[0].arrival_s or 0.0
    return tuple(replace(row, arrival_s=(row.arrival_s or 0.0) - first_s) for row in rows)


def _rows(
    path: Path, lines: Iterator[str], wanted: TraceFormat | None
) -> tuple[TraceFormat, Collection[str], Iterator[tuple[int, TraceRow]]]:
    first = next(lines, "")
    if not first.strip():
        raise ConfigError(f"{path}:1: the first line is empty")
    if wanted == "mooncake" or (wanted is None and first.lstrip().startswith("{")):
        return "mooncake", ("hash_ids",), _mooncake_rows(path, itertools.chain([first], lines))
    columns = [name.strip() for name in next(csv.reader([first]))]
    for name, needed in _HEADERS.items():
        if wanted in (None, name) and needed <= set(columns):
            filled = ["session" if column == "Session ID" else column for column in columns]
            return name, filled, _csv_rows(path, lines, columns, name)
    if wanted is not None:
        missing = ", ".join(sorted(_HEADERS[wanted] - set(columns)))
        raise ConfigError(f"{path}:1: {'an' if wanted == 'azure' else 'a'} {wanted} trace needs the columns {missing}")
    nearest = min(_HEADERS.values(), key=lambda needed: len(needed - set(columns)))
    hint = f" (missing here: {', '.join(sorted(nearest - set(columns)))})" if nearest & set(columns) else ""
    raise ConfigError(
        f"{path}:1: not a known trace{hint}. Known: Mooncake JSONL; CSV with the columns "
        + "; or ".join(", ".join(sorted(needed)) for needed in _HEADERS.values())
    )


def _mooncake_rows(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, TraceRow]]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    for line, text in enumerate(lines, start=1):
        if not text.strip():
            continue
        try:
            row = decoder.decode(text)
            prompt = _checked(row.input_length, "input_length")
            output = _checked(row.output_length, "output_length")
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigError(f"{path}:{line}: not a Mooncake row: {error}") from error
        yield line, TraceRow(row.timestamp / 1000.0, prompt, output, tuple(row.hash_ids))


def _csv_rows(
    path: Path, lines: Iterator[str], columns: list[str], kind: TraceFormat
) -> Iterator[tuple[int, TraceRow]]:
    reader = csv.reader(lines)
    try:
        for cells in reader:
            line = reader.line_num + 1  # the header was read before the reader started
            if not cells:
                continue
            if len(cells) != len(columns):
                lost = f"; column {columns[len(cells)]!r} is missing" if len(cells) < len(columns) else ""
                raise ConfigError(f"{path}:{line}: {len(cells)} of {len(columns)} columns{lost}")
            try:
                yield line, _csv_row(dict(zip(columns, cells, strict=True)), kind)
            except ValueError as error:
                raise ConfigError(f"{path}:{line}: {error}") from error
    except csv.Error as error:
        raise ConfigError(f"{path}:{reader.line_num + 1}: not CSV ({error})") from error


def _csv_row(row: Mapping[str, str], kind: TraceFormat) -> TraceRow:
    match kind:
        case "azure":
            return TraceRow(_utc_s(row["TIMESTAMP"]), _tokens(row, "ContextTokens"), _tokens(row, "GeneratedTokens"))
        case "burstgpt":
            return TraceRow(
                _seconds(row, "Timestamp"),
                _tokens(row, "Request tokens"),
                _tokens(row, "Response tokens"),
                session=row.get("Session ID", "").strip(),
            )
        case "cohort":
            return TraceRow(
                _seconds(row, "arrival_s") if row["arrival_s"].strip() else None,
                _tokens(row, "prompt_tokens"),
                _tokens(row, "output_tokens"),
                _hash_ids(row.get("hash_ids", "")),
                row.get("session", "").strip(),
                row.get("adapter", "").strip(),
            )
        case "mooncake":
            raise AssertionError("JSON lines, not CSV")


def _seconds(row: Mapping[str, str], column: str) -> float:
    text = row[column].strip()
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"column {column!r}: {text!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"column {column!r}: {text!r} is not a time")
    return value


def _utc_s(text: str) -> float:
    """Parse a time stamp. One without a zone counts as UTC, so that no daylight-saving jump falls into a trace."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise ValueError(f"column 'TIMESTAMP': {text!r} is not a time") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _tokens(row: Mapping[str, str], column: str) -> int:
    """Parse a count; some exports write whole numbers as floats ("12.0")."""
    text = row[column].strip()
    try:
        number = float(text)
    except ValueError:
        raise ValueError(f"column {column!r}: {text!r} is not a number") from None
    if not number.is_integer():
        raise ValueError(f"column {column!r}: {text!r} is not a whole number of tokens")
    return _checked(int(number), f"column {column!r}")


def _checked(tokens: int, name: str) -> int:
    if tokens < 0:
        raise ValueError(f"{name}: {tokens} tokens; a count must not be negative")
    if tokens > _MOST_TOKENS:
        raise ValueError(f"{name}: {tokens:g} tokens are more than any model takes")
    return tokens


def _hash_ids(text: str) -> tuple[int, ...]:
    found = []
    for part in text.split():
        try:
            found.append(int(part))
        except ValueError:
            raise ValueError(f"column 'hash_ids': {part[:40]!r} is not a whole number") from None
    return tuple(found)
