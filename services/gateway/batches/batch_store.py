"""The durable state of the gateway: files, batches and the lines of batches, in one SQLite database.

    validating ─▶ in_progress ─▶ finalizing ─▶ completed | expired
        │  └──────────┬──▶ cancelling ───────▶ cancelled
        └─▶ failed    └── lines: pending ─▶ finished (its output line, as it will stand in the file)

Every change is one transaction in a write-ahead log: a finished line is never run again after a kill. After a power
loss `synchronous=NORMAL` may forget the last moments (those lines run again) but corrupts nothing.

Called on the one thread of `StoreThread` by `batch_api.py` and `batch_runner.py`; times are wall-clock seconds.
`batch_files.py` has the contents.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from cohort.common.sqlite_file import OnThread, transaction
from cohort.services.gateway.batches.batch_records import (
    UNFINISHED,
    FinishedLine,
    LineError,
    PendingLine,
    StoredBatch,
    StoredFile,
)
from cohort.services.gateway.batches.batch_schema import LINE_BYTES, open_database, small_enough_to_check

_FILE = ", ".join(StoredFile.__struct_fields__)
_BATCH = ", ".join(StoredBatch.__struct_fields__)
_NOT_ENDED = ", ".join(f"'{status}'" for status in UNFINISHED)
SHRINK_PAGES = 1024  # given back at once, 4 MiB: other work need not wait long


@dataclass(frozen=True, slots=True)
class Usage:
    """Storage in use, of all owners and of one: bytes of files, uploads and lines; files; uploads."""

    bytes: int
    owner_bytes: int
    owner_files: int
    uploads: int
    owner_uploads: int


@dataclass(frozen=True, slots=True)
class _Upload:
    owner: str
    bytes: int


class BatchStore:
    def __init__(self, path: Path) -> None:
        """Open or create the database. Raises `ConfigError` for another version, `sqlite3.Error` for a broken one."""
        self._db = open_database(path)
        self._uploads: dict[str, _Upload] = {}
        self._to_write_back = False
        self.checked = small_enough_to_check(path)
        """Whether all of the database was seen to be sound when it was opened."""

    def close(self) -> None:
        self._db.close()

    def add_file(self, file: StoredFile) -> StoredFile:
        """Add a file for its upload, with a `seq` of its own. The same id is replaced: finalizing may repeat."""
        with transaction(self._db):
            stored = self._put_file(file)
        self.release(file.id)
        return stored

    def _put_file(self, file: StoredFile) -> StoredFile:
        columns = StoredFile.__struct_fields__[1:]
        marks = ", ".join("?" * len(columns))
        row = self._db.execute(
            f"INSERT OR REPLACE INTO files ({', '.join(columns)}) VALUES ({marks}) RETURNING {_FILE}",
            [getattr(file, name) for name in columns],
        ).fetchone()
        return msgspec.convert(dict(row), StoredFile)

    def file(self, file_id: str, owner: str, now_s: float) -> StoredFile | None:
        """Return a file; None also for another owner's and for one that has expired."""
        row = self._db.execute(
            f"SELECT {_FILE} FROM files WHERE id = ? AND owner = ? AND expires_at > ?", (file_id, owner, now_s)
        ).fetchone()
        return None if row is None else msgspec.convert(dict(row), StoredFile)

    def files(
        self, owner: str, now_s: float, *, purpose: str | None, after: str | None, limit: int, newest_first: bool
    ) -> list[StoredFile]:
        """List files in order of creation, after an id of the owner's (`after`); empty if that is unknown."""
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
        """Return whether an unfinished batch reads the file."""
        row = self._db.execute(
            f"SELECT 1 FROM batches WHERE input_file_id = ? AND status IN ({_NOT_ENDED}) LIMIT 1", (file_id,)
        ).fetchone()
        return row is not None

    def delete_file(self, file_id: str) -> None:
        self._db.execute("DELETE FROM files WHERE id = ?", (file_id,))

    def held_files(self) -> bool:
        """Return whether this database ever had a file; if not, contents beside it belong to another one."""
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = 'files'").fetchone()
        return row is not None and row[0] > 0

    def usage(self, owner: str) -> Usage:
        """Return the space in use. Lines count twice until their batch ends: a file copies them before they go."""
        files, owner_bytes, owner_files = self._db.execute(
            "SELECT coalesce(sum(bytes), 0), coalesce(sum(bytes) FILTER (WHERE owner = ?1), 0), "
            "count(*) FILTER (WHERE owner = ?1) FROM files",
            (owner,),
        ).fetchone()
        lines, owner_lines = self._db.execute(
            "SELECT coalesce(sum(line_bytes), 0), coalesce(sum(line_bytes) FILTER (WHERE owner = ?), 0) "
            f"FROM batches WHERE status IN ({_NOT_ENDED}, 'failed')",  # with its lines, if its files were not written
            (owner,),
        ).fetchone()
        uploads = self._uploads.values()
        own = [upload.bytes for upload in uploads if upload.owner == owner]
        return Usage(
            bytes=files + 2 * lines + sum(upload.bytes for upload in uploads),
            owner_bytes=owner_bytes + 2 * owner_lines + sum(own),
            owner_files=owner_files,
            uploads=len(uploads),
            owner_uploads=len(own),
        )

    def reserve(self, file_id: str, owner: str, size: int) -> None:
        """Count `size` bytes of an upload from now on; a restart forgets both."""
        self._uploads[file_id] = _Upload(owner, size)

    def release(self, file_id: str) -> None:
        self._uploads.pop(file_id, None)

    def add_batch(self, batch: StoredBatch) -> StoredBatch:
        """Add a batch and return it as stored: `batch.seq` is ignored."""
        columns = StoredBatch.__struct_fields__[1:]
        values = [_column(getattr(batch, name)) for name in columns]
        with transaction(self._db):
            row = self._db.execute(
                f"INSERT INTO batches ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))}) "
                f"RETURNING {_BATCH}",
                values,
            ).fetchone()
        return _batch(row)

    def forget_oldest(self, owner: str, retained: int) -> None:
        """Drop the owner's batches that have ended, but for those among the latest `retained` ones."""
        self._db.execute(
            f"DELETE FROM batches WHERE owner = ? AND status NOT IN ({_NOT_ENDED}) AND seq <= "
            "(SELECT seq FROM batches WHERE owner = ? ORDER BY seq DESC LIMIT 1 OFFSET ?)",
            (owner, owner, retained),
        )

    def batch(self, batch_id: str, owner: str | None = None) -> StoredBatch | None:
        """Return a batch of this owner, or of any owner for None."""
        row = self._db.execute(
            f"SELECT {_BATCH} FROM batches WHERE id = ? AND coalesce(? = owner, 1)", (batch_id, owner)
        ).fetchone()
        return None if row is None else _batch(row)

    def batches(self, owner: str, *, after: str | None, limit: int) -> list[StoredBatch]:
        """List batches, newest first, after an id of the owner's (`after`); empty if that is unknown."""
        where, values = "owner = ?", [owner]
        if after is not None:
            where += " AND seq < (SELECT seq FROM batches WHERE id = ? AND owner = ?)"
            values += [after, owner]
        rows = self._db.execute(
            f"SELECT {_BATCH} FROM batches WHERE {where} ORDER BY seq DESC LIMIT ?", [*values, limit]
        )
        return [_batch(row) for row in rows]

    def unfinished(self) -> list[str]:
        """Return the ids of unfinished batches, oldest first."""
        rows = self._db.execute(f"SELECT id FROM batches WHERE status IN ({_NOT_ENDED}) ORDER BY seq")
        return [row[0] for row in rows]

    def cancelling(self) -> list[str]:
        return [row[0] for row in self._db.execute("SELECT id FROM batches WHERE status = 'cancelling'")]

    def unfinished_count(self, owner: str) -> tuple[int, int]:
        """Count unfinished batches: all, and the owner's."""
        row = self._db.execute(
            f"SELECT count(*), count(*) FILTER (WHERE owner = ?) FROM batches WHERE status IN ({_NOT_ENDED})", (owner,)
        ).fetchone()
        return row[0], row[1]

    def counts(self) -> dict[str, int]:
        """Count batches by status."""
        return dict(self._db.execute("SELECT status, count(*) FROM batches GROUP BY status").fetchall())

    def add_lines(self, batch_id: str, lines: Sequence[PendingLine], *, first: bool) -> None:
        """Add lines found by validation. `first` drops those of a validation that was interrupted."""
        with transaction(self._db):
            if first:
                self._db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
            self._db.executemany(
                "INSERT INTO lines (batch_id, number, start, length, custom_id) VALUES (?, ?, ?, ?, ?)",
                [(batch_id, line.number, line.start, line.length, line.custom_id) for line in lines],
            )
            added = sum(len(line.custom_id.encode()) + LINE_BYTES for line in lines)
            self._db.execute(
                "UPDATE batches SET line_bytes = ? + CASE WHEN ? THEN 0 ELSE line_bytes END WHERE id = ?",
                (added, first, batch_id),
            )

    def begin(self, batch_id: str, now_s: float, *, model: str | None) -> None:
        """Start a batch (validating → in_progress), with the lines that were added."""
        with transaction(self._db):
            self._db.execute(
                "UPDATE batches SET status = 'in_progress', in_progress_at = ?, model = ?, "
                "total = (SELECT count(*) FROM lines WHERE batch_id = ?) WHERE id = ? AND status = 'validating'",
                (int(now_s), model, batch_id, batch_id),
            )

    def fail(self, batch_id: str, now_s: float, errors: Sequence[LineError]) -> None:
        """Fail a batch: validating → failed."""
        with transaction(self._db):
            self._db.execute(
                "UPDATE batches SET status = 'failed', failed_at = ?, errors = ? "
                "WHERE id = ? AND status = 'validating'",
                (int(now_s), _column(list(errors)), batch_id),
            )
            self._drop_lines(batch_id)

    def expire_unread(self, batch_id: str, now_s: float) -> None:
        """Expire a batch whose lines are not known: validating → expired."""
        with transaction(self._db):
            self._db.execute(
                "UPDATE batches SET status = 'expired', expired_at = ? WHERE id = ? AND status = 'validating'",
                (int(now_s), batch_id),
            )
            self._drop_lines(batch_id)

    def give_up(self, batch_id: str, now_s: float, errors: Sequence[LineError]) -> None:
        """Fail any batch that has not ended."""
        with transaction(self._db):
            self._db.execute(
                "UPDATE batches SET status = 'failed', failed_at = ?, errors = ?, failed = total - completed "
                f"WHERE id = ? AND status IN ({_NOT_ENDED})",
                (int(now_s), _column(list(errors)), batch_id),
            )
            self._drop_lines(batch_id)

    def leave_unwritten(self, batch_id: str, now_s: float, errors: Sequence[LineError]) -> None:
        """Fail a finalizing or cancelling batch without files. Lines stay until `reopen_unwritten` or retention."""
        with transaction(self._db):
            self._db.execute(
                "UPDATE batches SET status = 'failed', failed_at = ?, errors = ? "
                f"WHERE id = ? AND status IN ({_NOT_ENDED})",
                (int(now_s), _column(list(errors)), batch_id),
            )

    def reopen_unwritten(self) -> int:
        """Return to finalizing or cancelling the batches that ended with results and without files; return how many."""
        with transaction(self._db):
            changed = self._db.execute(
                "UPDATE batches SET failed_at = NULL, errors = NULL, "
                "status = CASE WHEN cancelling_at IS NULL THEN 'finalizing' ELSE 'cancelling' END "
                "WHERE status = 'failed' AND finalizing_at IS NOT NULL AND line_bytes > 0"
            )
        return changed.rowcount

    def _drop_lines(self, batch_id: str) -> None:
        self._db.execute("DELETE FROM lines WHERE batch_id = ?", (batch_id,))
        self._db.execute("UPDATE batches SET line_bytes = 0 WHERE id = ?", (batch_id,))

    def cancel(self, batch_id: str, now_s: float) -> bool:
        """Cancel a batch: validating or in_progress → cancelling. Return False if it was in another state."""
        with transaction(self._db):
            changed = self._db.execute(
                "UPDATE batches SET status = 'cancelling', cancelling_at = ? "
                "WHERE id = ? AND status IN ('validating', 'in_progress')",
                (int(now_s), batch_id),
            )
        return changed.rowcount == 1

    def pending(self, batch_id: str, *, after: int, limit: int) -> list[PendingLine]:
        """Return lines without a result and with a number above `after`, in order."""
        rows = self._db.execute(
            "SELECT number, start, length, custom_id FROM lines "
            "WHERE batch_id = ? AND result IS NULL AND number > ? ORDER BY number LIMIT ?",
            (batch_id, after, limit),
        )
        return [PendingLine(*row) for row in rows]

    def finish_line(self, batch_id: str, line: FinishedLine) -> bool:
        """Store a line's result. Return False if it has one, or its batch takes none any more."""
        with transaction(self._db):
            changed = self._db.execute(
                "UPDATE lines SET succeeded = ?, result = ? WHERE batch_id = ? AND number = ? AND result IS NULL "
                "AND (SELECT status FROM batches WHERE id = batch_id) IN ('in_progress', 'cancelling')",
                (line.succeeded, line.result, batch_id, line.number),
            )
            if changed.rowcount != 1:
                return False
            self._db.execute(
                "UPDATE batches SET completed = completed + ?, failed = failed + ?, input_tokens = input_tokens + ?, "
                "cached_tokens = cached_tokens + ?, output_tokens = output_tokens + ?, "
                "line_bytes = line_bytes + ? WHERE id = ?",
                (
                    line.succeeded,
                    not line.succeeded,
                    line.input_tokens,
                    line.cached_tokens,
                    line.output_tokens,
                    len(line.result),
                    batch_id,
                ),
            )
        return True

    def begin_finalizing(self, batch_id: str, now_s: float) -> None:
        """Start finalizing: in_progress → finalizing. A batch that is being cancelled keeps its status."""
        with transaction(self._db):
            self._db.execute(
                "UPDATE batches SET finalizing_at = coalesce(finalizing_at, ?), "
                "status = CASE status WHEN 'in_progress' THEN 'finalizing' ELSE status END "
                "WHERE id = ? AND status IN ('in_progress', 'finalizing', 'cancelling')",
                (int(now_s), batch_id),
            )

    def results(self, batch_id: str, *, succeeded: bool, after: int, page_bytes: int) -> list[tuple[int, bytes]]:
        """Return numbered output lines in order: at least one, more within `page_bytes`, none after the last."""
        rows = self._db.execute(
            "SELECT number, result FROM lines WHERE batch_id = ? AND succeeded = ? AND number > ? ORDER BY number",
            (batch_id, succeeded, after),
        )
        page: list[tuple[int, bytes]] = []
        size = 0
        for number, result in rows:
            page.append((number, result))
            size += len(result)
            if size >= page_bytes:
                break
        rows.close()
        return page

    def end(
        self,
        batch_id: str,
        now_s: float,
        status: Literal["completed", "expired", "cancelled", "failed"],
        *,
        output: StoredFile | None,
        errors: StoredFile | None,
        reasons: Sequence[LineError] | None = None,
    ) -> None:
        """End a finalizing or cancelling batch: its lines go, as they are in its files. `reasons`: of a failed one."""
        with transaction(self._db):
            for file in (output, errors):
                if file is not None:
                    self._put_file(file)
            self._db.execute(
                f"UPDATE batches SET status = ?, {status}_at = ?, output_file_id = ?, error_file_id = ?, "
                f"failed = total - completed, errors = ? WHERE id = ? AND status IN ({_NOT_ENDED})",
                (status, int(now_s), output and output.id, errors and errors.id, _column(reasons), batch_id),
            )
            self._drop_lines(batch_id)

    def forget(self, now_s: float, retention_s: float) -> list[str]:
        """Drop expired files that no running batch reads, and batches that ended long ago; ids of the files."""
        with transaction(self._db):
            expired = self._db.execute(
                "DELETE FROM files WHERE expires_at <= ? AND id NOT IN "
                f"(SELECT input_file_id FROM batches WHERE status IN ({_NOT_ENDED})) RETURNING id",
                (now_s,),
            ).fetchall()
            self._db.execute(
                f"DELETE FROM batches WHERE status NOT IN ({_NOT_ENDED}) "
                "AND coalesce(completed_at, failed_at, expired_at, cancelled_at, created_at) <= ?",
                (now_s - retention_s,),
            )
        return [row[0] for row in expired]

    def swept_at_s(self) -> float | None:
        """Return the wall clock at the last `note_sweep`, of this process or an earlier one."""
        row = self._db.execute("SELECT value FROM meta WHERE name = 'swept_at'").fetchone()
        return None if row is None else float(row[0])

    def note_sweep(self, now_s: float) -> None:
        self._db.execute("INSERT OR REPLACE INTO meta VALUES ('swept_at', ?)", (int(now_s),))

    def shrink(self) -> bool:
        """Give some of what deletions left free back to the disk, a piece at a time; whether there is more."""
        free = self._free_pages()
        if free:
            self._db.executescript(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")  # `execute` frees a single page
            remaining = self._free_pages()
            if remaining and remaining < free:
                return True
            self._to_write_back = True
        if self._to_write_back:  # the file is shorter only then; a reader in another process may prevent it this time
            self._to_write_back = bool(self._db.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0])
        return False

    def _free_pages(self) -> int:
        return int(self._db.execute("PRAGMA freelist_count").fetchone()[0])


class StoreThread(OnThread[BatchStore]):
    """`BatchStore` on a thread of its own, so that no query or disk ever holds up the event loop."""

    def __init__(self, path: Path) -> None:
        super().__init__(lambda: BatchStore(path), "batch-store")


def _column(value: object) -> object:
    return msgspec.json.encode(value).decode() if isinstance(value, dict | list | tuple) else value


def _batch(row: sqlite3.Row) -> StoredBatch:
    data = dict(row)
    for name in ("metadata", "errors"):
        if data[name] is not None:
            data[name] = msgspec.json.decode(data[name])
    return msgspec.convert(data, StoredBatch)
