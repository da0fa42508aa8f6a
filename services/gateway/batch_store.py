"""What the gateway must not forget: files, batches and the lines of batches, in one SQLite database.

    validating ─▶ in_progress ─▶ finalizing ─▶ completed | expired
        │  └──────────┬──▶ cancelling ───────▶ cancelled
        └─▶ failed    └── lines: pending ─▶ finished (its output line, as it will stand in the file)

Every change is one transaction in a write-ahead log, so a killed process leaves either all of it or nothing: a line
that is finished stays finished and is never run again. `synchronous=NORMAL` keeps that promise for a killed process; a
machine that loses power may forget the last moments before it (those lines run again) but never corrupts the database.

`BatchStore` is synchronous and belongs to the one thread of `StoreThread`, through which `batch_api.py` and
`batch_runner.py` call it. Time is an argument (wall-clock seconds). It holds no file's content; `batch_files.py` does.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from cohort.common.errors import ConfigError

SCHEMA_VERSION = 1

Status = Literal["validating", "in_progress", "finalizing", "completed", "failed", "cancelling", "cancelled", "expired"]
UNFINISHED: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE files (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    purpose TEXT NOT NULL,
    filename TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL
) STRICT;
CREATE INDEX files_by_expiry ON files (expires_at);
CREATE TABLE batches (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    status TEXT NOT NULL,
    endpoint TEXT NOT NULL,
    input_file_id TEXT NOT NULL,
    completion_window TEXT NOT NULL,
    created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL,
    output_retention_s INTEGER NOT NULL,
    metadata TEXT,
    model TEXT,
    errors TEXT,
    in_progress_at INTEGER,
    finalizing_at INTEGER,
    completed_at INTEGER,
    failed_at INTEGER,
    expired_at INTEGER,
    cancelling_at INTEGER,
    cancelled_at INTEGER,
    output_file_id TEXT,
    error_file_id TEXT,
    total INTEGER NOT NULL DEFAULT 0,
    completed INTEGER NOT NULL DEFAULT 0,
    failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0,
    cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE lines (
    batch_id TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE,
    number INTEGER NOT NULL,
    start INTEGER NOT NULL,
    length INTEGER NOT NULL,
    custom_id TEXT NOT NULL,
    succeeded INTEGER,
    result BLOB,
    PRIMARY KEY (batch_id, number)
) STRICT;
CREATE INDEX lines_pending ON lines (batch_id, number) WHERE result IS NULL;
"""


class StoredFile(msgspec.Struct, frozen=True):
    """A row of `files`. Times are Unix seconds."""

    seq: int
    id: str
    owner: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int


class LineError(msgspec.Struct, frozen=True):
    """Why an input file cannot be a batch. `line` counts from 1; None where the file as a whole is meant."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class StoredBatch(msgspec.Struct, frozen=True):
    """A row of `batches`. Times are Unix seconds; `output_retention_s` counts from the output files' creation."""

    seq: int
    id: str
    owner: str
    status: Status
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_retention_s: int
    metadata: dict[str, str] | None = None
    model: str | None = None
    errors: list[LineError] | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    @property
    def unfinished(self) -> bool:
        return self.status in UNFINISHED


class PendingLine(msgspec.Struct, frozen=True):
    """A line that has no result yet: where it stands in the input file, in bytes, without its line break."""

    number: int
    start: int
    length: int
    custom_id: str


class FinishedLine(msgspec.Struct, frozen=True):
    """A line of the output file (`succeeded`) or of the error file, and what it cost."""

    number: int
    succeeded: bool
    result: bytes
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0


_FILE = ", ".join(StoredFile.__struct_fields__)
_BATCH = ", ".join(StoredBatch.__struct_fields__)
_NOT_ENDED = ", ".join(f"'{status}'" for status in UNFINISHED)


class BatchStore:
    """One open database. Not for two threads at a time."""

    def __init__(self, path: Path) -> None:
        """Opens or creates it. Raises `ConfigError` for a database of another version, `sqlite3.Error` for a broken
        one."""
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
        try:
            self._db.row_factory = sqlite3.Row
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.execute("PRAGMA foreign_keys = ON")
            self._prepare(path)
        except BaseException:
            self._db.close()
            raise

    def close(self) -> None:
        self._db.close()

    def _prepare(self, path: Path) -> None:
        with self._transaction():
            known = self._db.execute("SELECT name FROM sqlite_master WHERE name = 'meta'").fetchone()
            if known is None:
                for statement in _SCHEMA.split(";"):
                    self._db.execute(statement)
                self._db.execute("INSERT INTO meta VALUES ('schema_version', ?)", (SCHEMA_VERSION,))
            version = self._db.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()[0]
        if version != SCHEMA_VERSION:
            raise ConfigError(
                f"batch.folder: {path} has schema version {version}, this version of Cohort reads {SCHEMA_VERSION}"
            )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    # -- Files -----------------------------------------------------------------------------------------------------

    def add_file(self, file: StoredFile) -> StoredFile:
        """`file.seq` is ignored; the stored one comes back. A file of the same id is replaced: finalizing repeats."""
        with self._transaction():
            return self._put_file(file)

    def _put_file(self, file: StoredFile) -> StoredFile:
        columns = StoredFile.__struct_fields__[1:]
        marks = ", ".join("?" * len(columns))
        row = self._db.execute(
            f"INSERT OR REPLACE INTO files ({', '.join(columns)}) VALUES ({marks}) RETURNING {_FILE}",
            [getattr(file, name) for name in columns],
        ).fetchone()
        return msgspec.convert(dict(row), StoredFile)

    def file(self, file_id: str, owner: str, now_s: float) -> StoredFile | None:
        """None also for somebody else's file and for one that has expired."""
        row = self._db.execute(
            f"SELECT {_FILE} FROM files WHERE id = ? AND owner = ? AND expires_at > ?", (file_id, owner, now_s)
        ).fetchone()
        return None if row is None else msgspec.convert(dict(row), StoredFile)

    def files(
        self, owner: str, now_s: float, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredFile]:
        """In order of creation. `after`: an id of the owner's; with an unknown one the list is empty."""
        where, values = ["owner = ?", "expires_at > ?"], [owner, now_s]
        if purpose is not None:
            where.append("purpose = ?")
            values.append(purpose)
        if after is not None:
            where.append(f"seq {'<' if newest_first else '>'} (SELECT seq FROM files WHERE id = ? AND owner = ?)")
            values += [after, owner]
        rows = self._db.execute(
            f"SELECT {_FILE} FROM files WHERE {' AND '.join(where)} "
            f"ORDER BY seq {'DESC' if newest_first else 'ASC'} LIMIT ?",
            [*values, limit],
        )
        return [msgspec.convert(dict(row), StoredFile) for row in rows]

    def file_ids(self) -> set[str]:
        return {row[0] for row in self._db.execute("SELECT id FROM files")}

    def file_in_use(self, file_id: str) -> bool:
        """A batch that has not ended reads it."""
        row = self._db.execute(
            f"SELECT 1 FROM batches WHERE input_file_id = ? AND status IN ({_NOT_ENDED}) LIMIT 1", (file_id,)
        ).fetchone()
        return row is not None

    def delete_file(self, file_id: str) -> None:
        self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def stored_bytes(self) -> int:
        return int(self._db.execute("SELECT coalesce(sum(bytes), 0) FROM files").fetchone()[0])

    # -- Batches ---------------------------------------------------------------------------------------------------

    def add_batch(self, batch: StoredBatch) -> StoredBatch:
        """`batch.seq` is ignored; the stored one comes back."""
        columns = StoredBatch.__struct_fields__[1:]
        values = [_column(getattr(batch, name)) for name in columns]
        with self._transaction():
            row = self._db.execute(
                f"INSERT INTO batches ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
                f"RETURNING {_BATCH}",
                values,
            ).fetchone()
        return _batch(row)

    def batch(self, batch_id: str, owner: str | None = None) -> StoredBatch | None:
        """`owner` None: whoever made it."""
        row = self._db.execute(
            f"SELECT {_BATCH} FROM batches WHERE id = ? AND coalesce(? = owner, 1)", (batch_id, owner)
        ).fetchone()
        return None if row is None else _batch(row)

    def batches(self, owner: str, *, after: str | None, limit: int) -> list[StoredBatch]:
        """Newest first. `after`: an id of the owner's; with an unknown one the list is empty."""
        where, values = "owner = ?", [owner]
        if after is not None:
            where += " AND seq < (SELECT seq FROM batches WHERE id = ? AND owner = ?)"
            values += [after, owner]
        rows = self._db.execute(
            f"SELECT {_BATCH} FROM batches WHERE {where} ORDER BY seq DESC LIMIT ?", [*values, limit]
        )
        return [_batch(row) for row in rows]

    def unfinished(self) -> list[str]:
        """Ids of the batches that have not ended, oldest first."""
        rows = self._db.execute(f"SELECT id FROM batches WHERE status IN ({_NOT_ENDED}) ORDER BY seq")
        return [row[0] for row in rows]

    def counts(self) -> dict[str, int]:
        """Batches by status."""
        return dict(self._db.execute("SELECT status, count(*) FROM batches GROUP BY status").fetchall())

    def add_lines(self, batch_id: str, lines: Sequence[PendingLine], *, first: bool) -> None:
        """Lines found while validating. `first` drops those of a validation that was cut off."""
        with self._transaction():
            if first:
                self._db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
            self._db.executemany(
                "INSERT INTO lines (batch_id, number, start, length, custom_id) VALUES (?, ?, ?, ?, ?)",
                [(batch_id, line.number, line.start, line.length, line.custom_id) for line in lines],
            )

    def begin(self, batch_id: str, now_s: float, *, model: str | None) -> None:
        """validating → in_progress, with the lines that were added."""
        with self._transaction():
            self._db.execute(
                "UPDATE batches SET status = 'in_progress', in_progress_at = ?, model = ?, "
                "total = (SELECT count(*) FROM lines WHERE batch_id = ?) WHERE id = ? AND status = 'validating'",
                (int(now_s), model, batch_id, batch_id),
            )

    def fail(self, batch_id: str, now_s: float, errors: Sequence[LineError]) -> None:
        """validating → failed."""
        with self._transaction():
            self._db.execute(
                "UPDATE batches SET status = 'failed', failed_at = ?, errors = ? "
                "WHERE id = ? AND status = 'validating'",
                (int(now_s), msgspec.json.encode(list(errors)).decode(), batch_id),
            )
            self._db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))

    def cancel(self, batch_id: str, now_s: float) -> bool:
        """validating or in_progress → cancelling; False when it is too late or under way already."""
        with self._transaction():
            changed = self._db.execute(
                "UPDATE batches SET status = 'cancelling', cancelling_at = ? "
                "WHERE id = ? AND status IN ('validating', 'in_progress')",
                (int(now_s), batch_id),
            )
        return changed.rowcount == 1

    def pending(self, batch_id: str, *, after: int, limit: int) -> list[PendingLine]:
        """Lines without a result and with a number above `after`, in order."""
        rows = self._db.execute(
            "SELECT number, start, length, custom_id FROM lines "
            "WHERE batch_id = ? AND result IS NULL AND number > ? ORDER BY number LIMIT ?",
            (batch_id, after, limit),
        )
        return [PendingLine(*row) for row in rows]

    def finish_line(self, batch_id: str, line: FinishedLine) -> bool:
        """Once and for all. False when it has a result already, or its batch no longer takes any."""
        with self._transaction():
            changed = self._db.execute(
                "UPDATE lines SET succeeded = ?, result = ? WHERE batch_id = ? AND number = ? AND result IS NULL "
                "AND (SELECT status FROM batches WHERE id = batch_id) IN ('in_progress', 'cancelling')",
                (line.succeeded, line.result, batch_id, line.number),
            )
            if changed.rowcount != 1:
                return False
            self._db.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ?, input_tokens = input_tokens + ?, "
                "cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ? WHERE id = ?",
                (
                    line.succeeded,
                    not line.succeeded,
                    line.input_tokens,
                    line.cached_tokens,
                    line.output_tokens,
                    batch_id,
                ),
            )
        return True

    def begin_finalizing(self, batch_id: str, now_s: float) -> None:
        """in_progress → finalizing. A batch that is being cancelled keeps saying so until it is cancelled."""
        with self._transaction():
            self._db.execute(
                "UPDATE batches SET finalizing_at = coalesce(finalizing_at, ?), "
                "status = CASE status WHEN 'in_progress' THEN 'finalizing' ELSE status END "
                "WHERE id = ? AND status IN ('in_progress', 'finalizing', 'cancelling')",
                (int(now_s), batch_id),
            )

    def results(self, batch_id: str, *, succeeded: bool, after: int, limit: int) -> list[tuple[int, bytes]]:
        """Numbers and output lines, in the order of the input."""
        rows = self._db.execute(
            "SELECT number, result FROM lines WHERE batch_id = ? AND succeeded = ? AND number > ? "
            "ORDER BY number LIMIT ?",
            (batch_id, succeeded, after, limit),
        )
        return [(row[0], row[1]) for row in rows]

    def end(
        self,
        batch_id: str,
        now_s: float,
        status: Literal["completed", "expired", "cancelled"],
        *,
        output: StoredFile | None,
        errors: StoredFile | None,
    ) -> None:
        """finalizing or cancelling → its end, together with its files. The lines are in them now and go."""
        with self._transaction():
            for file in (output, errors):
                if file is not None:
                    self._put_file(file)
            self._db.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, output_file_id = ?, error_file_id = ?, "
                "failed = total - completed WHERE id = ?",
                (status, int(now_s), output and output.id, errors and errors.id, batch_id),
            )
            self._db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))

    # -- Retention -------------------------------------------------------------------------------------------------

    def forget(self, now_s: float, retention_s: float) -> list[str]:
        """Drop expired files that no running batch reads, and batches that ended long ago; ids of the files."""
        with self._transaction():
            gone = self._db.execute(
                "DELETE FROM files WHERE expires_at <= ? AND id NOT IN "
                f"(SELECT input_file_id FROM batches WHERE status IN ({_NOT_ENDED})) RETURNING id",
                (now_s,),
            ).fetchall()
            self._db.execute(
                f"DELETE FROM batches WHERE status NOT IN ({_NOT_ENDED}) "
                "AND coalesce(completed_at, failed_at, expired_at, cancelled_at, created_at) <= ?",
                (now_s - retention_s,),
            )
        return [row[0] for row in gone]


T = TypeVar("T")


class StoreThread:
    """A `BatchStore` behind a thread of its own, so that no query or disk ever holds up the event loop."""

    def __init__(self, path: Path) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="batch-store")
        self._store = BatchStore(path)

    async def run(self, work: Callable[[BatchStore], T]) -> T:
        """Calls run one after the other, in the order they came in."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, self._store)

    def close(self) -> None:
        """After what was asked for; blocks for as long as that takes."""
        self._executor.submit(self._store.close).result()
        self._executor.shutdown()


def _column(value: object) -> object:
    return msgspec.json.encode(value).decode() if isinstance(value, dict | list) else value


def _batch(row: sqlite3.Row) -> StoredBatch:
    data = dict(row)
    for name in ("metadata", "errors"):
        if data[name] is not None:
            data[name] = msgspec.json.decode(data[name])
    return msgspec.convert(data, StoredBatch)
