"""A SQLite database for this process's user alone, and a thread that owns what is kept in one.

Used by the stores of batches, stored responses, resumable streams and usage; no other module opens one. Decides the
modes of the files (0600), the journal, transactions, upgrades of tables, and which errors are the disk's; knows no
table but `meta`, where a store has one.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from cohort.common.errors import ConfigError

BUSY_S = 10.0
"""Longest wait of a statement for other processes."""
LOG_BYTES = 1 << 26  # of the write-ahead log on disk, once it was written back


def opened(
    path: Path,
    name: str,
    version: int,
    schema: str,
    upgrades: Mapping[int, str] | None = None,
    *,
    gives_back: bool = False,
    overwrites: bool = False,
    check: Callable[[sqlite3.Connection], None] | None = None,
) -> sqlite3.Connection:
    """Open or make a database, with the tables of this version. `gives_back`: its free pages can leave the file.
    `overwrites`: what is deleted is overwritten. `check` runs before tables are made or changed. Raises `ConfigError`,
    which begins with `name`, for another version; `sqlite3.Error` or `OSError` if it cannot be used."""
    _make_private(path)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=BUSY_S)
    try:
        db.row_factory = sqlite3.Row
        if gives_back:
            db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new database; an old one needs VACUUM too
        use_log(db)
        db.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA foreign_keys = ON")
        if overwrites:
            db.execute("PRAGMA secure_delete = ON")
        if check is not None:
            check(db)
        _prepare(db, name, version, schema, upgrades or {})
        if gives_back and db.execute("PRAGMA auto_vacuum").fetchone()[0] == 0:
            with suppress(sqlite3.OperationalError):  # a full disk: the database stays as large as it was
                db.execute("PRAGMA auto_vacuum = INCREMENTAL")
                db.execute("VACUUM")
    except BaseException:
        db.close()
        raise
    return db


def opened_to_read(path: Path, name: str, versions: Collection[int]) -> tuple[sqlite3.Connection, int]:
    """Open a database of one of these versions read-only. Return it and its version. Raises as `opened`."""
    db = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None, timeout=BUSY_S)
    try:
        found = version_of(db)
        if found is None or found not in versions:
            raise _other_version(name, found, max(versions))
    except BaseException:
        db.close()
        raise
    return db, found


def use_log(db: sqlite3.Connection) -> None:
    """Make a write-ahead log its journal. Only here SQLite does not wait (`timeout`) for another process that makes the
    same database."""
    deadline_s = time.monotonic() + BUSY_S
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline_s:
                raise
            time.sleep(0.01)


def _make_private(path: Path) -> None:
    """Make the file, mode 0600, or give an existing one that mode. SQLite gives its log the database's mode."""
    try:
        # Never opened and closed when it exists: closing a file drops all locks that this process has on it.
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
    except FileExistsError:
        for name in (path.name, f"{path.name}-wal", f"{path.name}-shm"):
            if path.with_name(name).is_file():
                with suppress(FileNotFoundError):  # another process may close the database, which removes its log
                    path.with_name(name).chmod(0o600)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Commit all that the block changes, or nothing if it raises. No other process writes meanwhile."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


def version_of(db: sqlite3.Connection) -> int | None:
    """Return the version of the tables, from table `meta` if there is one, else the file's header; 0 = no tables."""
    if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None:
        return int(db.execute("PRAGMA user_version").fetchone()[0])
    row = db.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()
    return None if row is None else int(row[0])


def _prepare(db: sqlite3.Connection, name: str, version: int, schema: str, upgrades: Mapping[int, str]) -> None:
    """Make the tables of a new database, or upgrade those of an older one step by step: `upgrades` lead from a version
    to the next. In one transaction, once where several processes open it. Statements end with a semicolon, and have
    none inside."""
    with transaction(db):
        found = was = version_of(db)
        if found == 0:
            _run(db, schema)
            found = version
        while found is not None and found < version and found in upgrades:
            _run(db, upgrades[found])
            found += 1
        if found == version != was:
            if db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone() is None:
                db.execute(f"PRAGMA user_version = {version}")
            else:
                db.execute("INSERT OR REPLACE INTO meta VALUES ('schema_version', ?)", (version,))
    if found != version:
        raise _other_version(name, found, version)


def _other_version(name: str, found: int | None, reads: int) -> ConfigError:
    return ConfigError(f"{name} has schema version {found}, this version of Cohort reads {reads}")


def _run(db: sqlite3.Connection, statements: str) -> None:
    """Run statements inside the open transaction, which `executescript` would end."""
    for statement in statements.split(";"):
        db.execute(statement)


def disk_refuses(error: BaseException) -> bool:
    """Return whether an error comes from the disk or the database's file (full, gone, damaged), so that a retry is
    right, and not from a defect of this program."""
    if isinstance(error, BaseExceptionGroup):
        return all(disk_refuses(inner) for inner in error.exceptions)
    if isinstance(error, sqlite3.OperationalError):
        return getattr(error, "sqlite_errorcode", None) != sqlite3.SQLITE_ERROR  # that one is a wrong statement of ours
    return isinstance(error, OSError) or type(error) is sqlite3.DatabaseError


class Closing(Protocol):
    def close(self) -> None: ...


S = TypeVar("S", bound=Closing)
T = TypeVar("T")


class OnThread(Generic[S]):
    """A store behind a thread of its own, which opens it too: no query and no disk delays the event loop."""

    def __init__(self, opening: Callable[[], S], name: str) -> None:
        """Open the store with the first `run`, which raises what `opening` raises; the next one tries again."""
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._opening = opening
        self._store: S | None = None

    @property
    def opened(self) -> bool:
        return self._store is not None

    async def open(self) -> None:
        """Open the store now, not with the first call."""
        await self.run(lambda _: None)

    async def run(self, work: Callable[[S], T]) -> T:
        """Run `work` on the store. Calls run one after the other, in order."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._in_thread, work)

    def run_detached(self, work: Callable[[S], object]) -> None:
        """Run `work` without waiting: also where a task ends and cannot wait any more."""
        self._executor.submit(self._in_thread, work)

    def close(self) -> None:
        """Close the store after all calls; blocks until then."""
        self._executor.submit(self._close).result()
        self._executor.shutdown()

    def _in_thread(self, work: Callable[[S], T]) -> T:
        if self._store is None:
            self._store = self._opening()
        return work(self._store)

    def _close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()
