"""Writes the output of resumable streams to the database before their clients see it.

One transaction runs at a time, in a thread; tokens that arrive meanwhile share the next one. Used by `resumption.py`.
If the database fails, that is logged and streams continue, but cannot be resumed after this process.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import structlog

from cohort.common.errors import CohortError
from cohort.common.sqlite_file import OnThread
from cohort.services.gateway.generation.delta import Delta
from cohort.services.gateway.resume.resume_session import ResumeLog
from cohort.services.gateway.resume.resume_store import ResumeStore, encoded

T = TypeVar("T")
DISK_ERRORS = (sqlite3.Error, OSError)


class Journal:
    def __init__(
        self, path: Path, holder_id: str, on_lost: Callable[[str, bool], None], log: structlog.stdlib.BoundLogger
    ) -> None:
        """`on_lost` gets the digest of a lost stream. True: to another gateway, False: its client cancelled it."""
        self._path = path
        self._store = OnThread(self._open, "streams")
        self._holder_id = holder_id
        self._on_lost = on_lost
        self._log = log
        self._changed: dict[str, ResumeLog] = {}
        self._unstored: dict[str, list[Delta]] = {}
        """Deltas that clients have seen although the disk refused them; they are written before anything later."""
        self._retry_at: dict[str, int] = {}
        """Number of those with which they are tried again, a quarter more: each is encoded a few times alone."""
        self._writing: asyncio.Task[None] | None = None
        self._failing = False

    @property
    def opened(self) -> bool:
        return self._store.opened

    async def run(self, work: Callable[[ResumeStore], T]) -> T:
        """Run work on the database, one call after the other; the first opens it. Raises `DISK_ERRORS`."""
        return await self._store.run(work)

    def _open(self) -> ResumeStore:
        try:
            return ResumeStore(self._path)
        except CohortError as error:
            raise sqlite3.OperationalError(str(error)) from error

    def schedule(self, digest: str, resume_log: ResumeLog) -> None:
        """Schedule a write of the log's unwritten deltas."""
        self._changed[digest] = resume_log
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write(), name="write streams")

    async def _write(self) -> None:
        try:
            while self._changed:
                changed, self._changed = self._changed, {}
                writes = [(digest, resume_log, resume_log.take_unwritten()) for digest, resume_log in changed.items()]
                tried: dict[str, list[Delta]] = {}
                for digest, _, deltas in writes:
                    unstored = self._unstored.pop(digest, [])
                    unstored += deltas
                    due = len(unstored) >= self._retry_at.get(digest, 0)
                    (tried if due else self._unstored)[digest] = unstored
                rows = [(digest, encoded(deltas)) for digest, deltas in tried.items()]
                lost: dict[str, bool] = {}
                try:
                    if rows:
                        lost = await self.run(lambda store, rows=rows: store.append(self._holder_id, rows))  # type: ignore[misc]
                        self._failing = False
                        for digest in tried:
                            self._retry_at.pop(digest, None)
                except DISK_ERRORS as error:
                    self.log_failure(error)
                    self._unstored |= tried
                    self._retry_at |= {digest: len(deltas) + len(deltas) // 4 for digest, deltas in tried.items()}
                for digest, resume_log, deltas in writes:
                    if digest in lost:
                        self._on_lost(digest, lost[digest])
                    else:
                        resume_log.publish(deltas)
        finally:
            self._writing = None

    async def flush(self, digest: str) -> None:
        """Write the stream's deltas that the disk refused before. Raises `DISK_ERRORS`."""
        self._retry_at.pop(digest, None)
        deltas = self._unstored.pop(digest, None)
        if deltas is not None:
            rows = [(digest, encoded(deltas))]
            await self.run(lambda store: store.append(self._holder_id, rows))

    def log_failure(self, error: BaseException) -> None:
        if not self._failing:
            self._log.error("streams are not kept for a resume", database=str(self._path), reason=str(error))
        self._failing = True

    async def close(self) -> None:
        if self._writing is not None:
            await self._writing
        await asyncio.to_thread(self._store.close)
