"""A SQLite database for this process's user alone, and a thread that owns what is kept in one.

Used by the stores of batches, kept responses, resumable streams and usage. Decides the modes of the files (0600), the
journal, what a transaction is and how work gets to the thread; knows no table.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

LOG_BYTES = 1 << 26  # what the write-ahead log may keep on disk after it was written back


def connect(path: Path) -> sqlite3.Connection:
    """Opens or creates it, without tables. Raises `sqlite3.Error` for one that cannot be used."""
    make_private(path)
    db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=10.0)
    try:
        db.row_factory = sqlite3.Row
        db.execute("PRAGMA auto_vacuum = INCREMENTAL")  # of a new database; an old one needs VACUUM too
        db.execute("PRAGMA journal_mode = WAL")
        db.execute(f"PRAGMA journal_size_limit = {LOG_BYTES}")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA foreign_keys = ON")
    except BaseException:
        db.close()
        raise
    return db


def make_private(path: Path) -> None:
    """Mode 0600, before there is anything in it. SQLite gives its log the database's mode."""
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
    """All that the block changes, or nothing of it where the block raises. No other process writes meanwhile."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        db.execute("ROLLBACK")
        raise
    db.execute("COMMIT")


class Closing(Protocol):
    def close(self) -> None: ...


S = TypeVar("S", bound=Closing)
T = TypeVar("T")


class OnThread(Generic[S]):
    """A store behind a thread of its own: no query and no disk ever holds up the event loop."""

    def __init__(self, store: S, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._store = store

    async def run(self, work: Callable[[S], T]) -> T:
        """Calls run one after the other, in the order they came in."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, self._store)

    def tell(self, work: Callable[[S], object]) -> None:
        """As `run`, for what nothing waits for: also where a task ends and cannot wait any more."""
        self._executor.submit(work, self._store)

    def close(self) -> None:
        """After what was asked for; blocks for as long as that takes."""
        self._executor.submit(self._store.close).result()
        self._executor.shutdown()
