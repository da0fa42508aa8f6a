"""The database of files and batches: its tables, its opening, and the upgrade of an older one.

Called by `batch_store.py`. Decides the schema and whether a database may be used; reads and writes no rows.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from cohort.common.sqlite_file import opened

SCHEMA_VERSION = 2
LINE_BYTES = 256
"""Bytes of a line besides its custom id and result, here and in the output file: positions, keys, an envelope."""
CHECKED_BYTES = 1 << 28
"""Databases up to this size are read whole at start to see that they are sound: a second at most."""

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
CREATE INDEX files_by_owner ON files (owner, bytes);
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
    output_tokens INTEGER NOT NULL DEFAULT 0,
    line_bytes INTEGER NOT NULL DEFAULT 0
) STRICT;
CREATE INDEX batches_by_status ON batches (status);
CREATE INDEX batches_by_owner ON batches (owner, seq);
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

# Version 2 counts the bytes of lines, so that results are within the storage limit, and those of an owner.
_TO_VERSION_2 = f"""
ALTER TABLE batches ADD COLUMN line_bytes INTEGER NOT NULL DEFAULT 0;
CREATE INDEX files_by_owner ON files (owner, bytes);
CREATE INDEX batches_by_owner ON batches (owner, seq);
UPDATE batches SET line_bytes = coalesce((
    SELECT sum(length(CAST(custom_id AS BLOB)) + {LINE_BYTES} + coalesce(length(result), 0))
    FROM lines WHERE batch_id = batches.id
), 0)
"""


def open_database(path: Path) -> sqlite3.Connection:
    """Open, create or convert. Raises `ConfigError` for an unknown version, `sqlite3.Error` for a bad database."""
    name, upgrades = f"state.folder: {path}", {1: _TO_VERSION_2}
    return opened(path, name, SCHEMA_VERSION, _SCHEMA, upgrades, gives_back=True, check=lambda db: _check(db, path))


def small_enough_to_check(path: Path) -> bool:
    """Return whether `open_database` has read all of it."""
    return path.stat().st_size <= CHECKED_BYTES


def _check(db: sqlite3.Connection, path: Path) -> None:
    if small_enough_to_check(path):
        found = db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if found != "ok":
            raise sqlite3.DatabaseError(f"the database is damaged: {found}")
