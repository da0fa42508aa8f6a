"""Writes what is generated for resumable streams before their clients see it: all that came meanwhile at once.

One transaction runs at a time, in a thread; tokens that arrive meanwhile share the next one. Used by `resumption.py`.
If the database fails, it is logged and streams go on, but cannot be resumed after this process.
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
        self, path: Path, holder: str, lost: Callable[[str, bool], None], log: structlog.stdlib.BoundLogger
    ) -> None:
        """`lost` gets the digest of a stream that is no longer ours: it moved, or its client cancelled it."""
        self._path = path
        self._kept = OnThread(self._opening, "streams")
        self._holder = holder
        self._lost = lost
        self._log = log
        self._changed: dict[str, ResumeLog] = {}
        self._owed: dict[str, list[Delta]] = {}
        """Deltas that clients have seen although the disk refused them; they are written before anything later."""
        self._writing: asyncio.Task[None] | None = None
        self._failing = False

    @property
    def opened(self) -> bool:
        return self._kept.opened

    async def run(self, work: Callable[[ResumeStore], T]) -> T:
        """Run work on the database, one call after the other; the first opens it. Raises `DISK_ERRORS`."""
        return await self._kept.run(work)

    def _opening(self) -> ResumeStore:
        try:
            return ResumeStore(self._path)
        except CohortError as error:
            raise sqlite3.OperationalError(str(error)) from error

    def changed(self, token: str, tape: ResumeLog) -> None:
        """Note that the tape has something to write."""
        self._changed[token] = tape
        if self._writing is None:
            self._writing = asyncio.get_running_loop().create_task(self._write(), name="write streams")

    async def _write(self) -> None:
        try:
            while self._changed:
                changed, self._changed = self._changed, {}
                taken = [(token, tape, tape.take_unwritten()) for token, tape in changed.items()]
                said = [(token, encoded([*self._owed.get(token, ()), *deltas])) for token, _, deltas in taken]
                lost: dict[str, bool] = {}
                try:
                    lost = await self.run(lambda store, said=said: store.append(self._holder, said))  # type: ignore[misc]
                    self._failing = False
                    for token, _, _ in taken:
                        self._owed.pop(token, None)
                except DISK_ERRORS as error:
                    self.refused(error)
                    for token, _, deltas in taken:
                        self._owed.setdefault(token, []).extend(deltas)
                for token, tape, deltas in taken:
                    if token in lost:
                        self._lost(token, lost[token])
                    else:
                        tape.written(deltas)
        finally:
            self._writing = None

    async def settle(self, token: str) -> None:
        """Write what is owed of this stream. Raises `DISK_ERRORS`."""
        owed = self._owed.pop(token, None)
        if owed is not None:
            said = [(token, encoded(owed))]
            await self.run(lambda store: store.append(self._holder, said))

    def refused(self, error: BaseException) -> None:
        if not self._failing:
            self._log.error("streams are not kept for a resume", database=str(self._path), reason=str(error))
        self._failing = True

    async def close(self) -> None:
        if self._writing is not None:
            await self._writing
        await asyncio.to_thread(self._kept.close)
