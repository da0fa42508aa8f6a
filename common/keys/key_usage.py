"""The usage of each API key, by day and class, in an SQLite database that outlives the gateway.

Rows are only ever added to, in one transaction each time, so several gateways may share a database (write-ahead log).
A killed gateway loses what it had not written yet, a second's worth. Written and read by gateways through a thread
(`services/gateway/keys/usage.py`), read by `cohort keys usage`. Holds no key, no hash, no prompt. Days are UTC's.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from cohort.common import paths
from cohort.common.errors import ConfigError
from cohort.common.sqlite_file import opened, opened_to_read, transaction

RETENTION_DAYS = 400
"""A year, and the month that is billed after it."""
VERSION = 2
"""Version of the tables; 1 had nothing of SLOs."""
_SCHEMA = """
CREATE TABLE usage (
    date TEXT NOT NULL,
    key_id TEXT NOT NULL,
    class TEXT NOT NULL,
    key_name TEXT NOT NULL,
    requests INTEGER NOT NULL DEFAULT 0,
    prompt_tokens INTEGER NOT NULL DEFAULT 0,
    completion_tokens INTEGER NOT NULL DEFAULT 0,
    refused INTEGER NOT NULL DEFAULT 0,
    slo_requests INTEGER NOT NULL DEFAULT 0,
    slo_met INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (date, key_id, class)
) STRICT, WITHOUT ROWID
"""
_TO_VERSION_2 = """
ALTER TABLE usage ADD COLUMN slo_requests INTEGER NOT NULL DEFAULT 0;
ALTER TABLE usage ADD COLUMN slo_met INTEGER NOT NULL DEFAULT 0
"""
_ADD = """
INSERT INTO usage
    (date, key_id, class, key_name, requests, prompt_tokens, completion_tokens, refused, slo_requests, slo_met)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (date, key_id, class) DO UPDATE SET
    key_name = excluded.key_name,
    requests = requests + excluded.requests,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    completion_tokens = completion_tokens + excluded.completion_tokens,
    refused = refused + excluded.refused,
    slo_requests = slo_requests + excluded.slo_requests,
    slo_met = slo_met + excluded.slo_met
"""


class Where(msgspec.Struct, frozen=True):
    """Key of a row."""

    date: str
    key_id: str
    traffic_class: str = msgspec.field(name="class")


class Amounts(msgspec.Struct):
    """Amounts that a key used. `refused`: requests beyond a limit of the key, not in `requests`. `slo_requests`: ended
    ones with SLOs, each choice is one; `slo_met`: those that met all of them."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    refused: int = 0
    slo_requests: int = 0
    slo_met: int = 0

    def add(self, other: Amounts) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens


class UsageRow(msgspec.Struct, frozen=True, kw_only=True):
    """Usage of one key on one day as one class."""

    date: str
    key_id: str
    key_name: str
    traffic_class: str = msgspec.field(name="class")
    requests: int
    prompt_tokens: int
    completion_tokens: int
    refused: int
    slo_requests: int = 0
    slo_met: int = 0

    @property
    def slo_attainment(self) -> float | None:
        """Share of requests that met their SLOs; None if none had any."""
        return self.slo_met / self.slo_requests if self.slo_requests else None


def usage_file(state_folder: str = "") -> Path:
    return paths.state_dir(state_folder) / "key-usage.sqlite3"


def day_of(wall_s: float) -> str:
    """Return the day of UTC, such as 2026-11-30."""
    return datetime.datetime.fromtimestamp(wall_s, datetime.UTC).date().isoformat()


class UsageStore:
    """One open database, for one thread at a time."""

    def __init__(self, path: Path, *, read_only: bool = False) -> None:
        """Open or create it, mode 0600. Raises `ConfigError` if it is missing (`read_only`) or of another version,
        `sqlite3.Error` or `OSError` if it cannot be used."""
        name, version = f"state.folder: {path}", VERSION
        if read_only:
            if not path.is_file():
                raise ConfigError(f"{name}: there is none yet; a gateway with keys writes it")
            self._db, version = opened_to_read(path, name, (1, VERSION))
        else:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._db = opened(path, name, VERSION, _SCHEMA, {1: _TO_VERSION_2})
        self._counts_slo = version == VERSION
        """Whether the tables have SLOs; False if a gateway of an earlier version writes them."""

    def close(self) -> None:
        self._db.close()

    def add(self, used: Mapping[Where, tuple[str, Amounts]]) -> None:
        """Add (key's name, amounts) to each row; all of it or, if that raises, nothing."""
        astuple = msgspec.structs.astuple
        with transaction(self._db):
            rows = ((*astuple(where), name, *astuple(more)) for where, (name, more) in used.items())
            self._db.executemany(_ADD, rows)

    def rows(self, *, since: str, until: str = "9999", key_id: str | None = None) -> list[UsageRow]:
        """Return the rows of days `since` to `until`, both included, the latest first."""
        columns = "date, key_id, key_name, class, requests, prompt_tokens, completion_tokens, refused"
        columns += ", slo_requests, slo_met" if self._counts_slo else ""
        found: Iterable[tuple[object, ...]] = self._db.execute(
            f"SELECT {columns} FROM usage WHERE date >= ? AND date <= ? AND (? IS NULL OR key_id = ?) "
            "ORDER BY date DESC, key_name, key_id, class",
            (since, until, key_id, key_id),
        )
        names = columns.split(", ")
        return [msgspec.convert(dict(zip(names, row, strict=True)), UsageRow) for row in found]

    def forget(self, before: str) -> None:
        """Delete the days before this one."""
        self._db.execute("DELETE FROM usage WHERE date < ?", (before,))
