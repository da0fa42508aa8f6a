"""What keys use, on its way to the database: added up here, written a moment later by a thread.

`tenants.py` reports every request's end or refusal. A database that fails costs figures, never a request: what could
not be written is tried again with what came since.
"""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import structlog

from cohort.common.clock import Clock
from cohort.common.errors import RequestError
from cohort.common.keys.key_usage import RETENTION_DAYS, Amounts, UsageRow, UsageStore, Where, day_of
from cohort.common.sqlite_file import OnThread
from cohort.common.types import TrafficClass
from cohort.services.gateway.keys.keyring import Key

FLUSH_S = 1.0
DAY_S = 86_400
_Used = dict[Where, tuple[str, Amounts]]


class UsageBook:
    """`open` before use, `close` after it; without, everything counts for nothing."""

    def __init__(self, path: Path, clock: Clock, log: structlog.stdlib.BoundLogger) -> None:
        self._path = path
        self._clock = clock
        self._log = log
        self._pending: _Used = {}
        self._store: OnThread[UsageStore] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._swept = ""
        self._failing = False
        self._before: dict[Where, int] = {}
        """Tokens of the day on which this was opened, until then."""

    async def open(self) -> None:
        self._store = store = OnThread(lambda: UsageStore(self._path), "key-usage")
        today = day_of(self._clock.wall_s())
        try:
            rows = await store.run(lambda usage: usage.rows(since=today, until=today))
        except (sqlite3.Error, OSError) as error:
            self._log.error("usage of keys is NOT kept", database=str(self._path), reason=str(error))
            return
        for row in rows:
            place = Where(row.date, row.key_id, row.traffic_class)
            self._before[place] = row.prompt_tokens + row.completion_tokens

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        store = self._store
        if store is not None:
            await self.flush()
            self._store = None
            await asyncio.to_thread(store.close)

    def tokens_before(self, key: Key, traffic_class: TrafficClass) -> int:
        """Return today's tokens from before this process opened the database."""
        return self._before.get(Where(day_of(self._clock.wall_s()), key.id, traffic_class), 0)

    def add(self, key: Key, traffic_class: TrafficClass, more: Amounts) -> None:
        if self._store is None or not self._store.opened:
            return
        where = Where(day_of(self._clock.wall_s()), key.id, traffic_class)
        _, amounts = self._pending.setdefault(where, (key.name, Amounts()))
        amounts.add(more)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._write_soon)

    async def rows(self, days: int, key_id: str | None) -> list[UsageRow]:
        """Return the usage of today and of `days` before, of one key or of all. Raises a 503 `RequestError`."""
        await self.flush()
        store, since = self._store, day_of(self._clock.wall_s() - DAY_S * days)
        try:
            if store is None or not store.opened:
                raise sqlite3.OperationalError("it was not opened")
            return await store.run(lambda usage: usage.rows(since=since, key_id=key_id))
        except sqlite3.Error as error:
            self._log.error("usage of keys cannot be read", reason=str(error))
            raise RequestError(
                "Usage is not available: the server's database for it cannot be used.", status=503, type_="server_error"
            ) from error

    async def flush(self) -> None:
        """Write what came until now, unless the database refuses."""
        store, used, self._pending = self._store, self._pending, {}
        if store is None or not used:
            return
        before = day_of(self._clock.wall_s() - DAY_S * RETENTION_DAYS)
        try:
            await store.run(lambda usage: self._write(usage, used, before))
            self._failing = False
        except sqlite3.Error as error:
            for where, (name, amounts) in used.items():
                self._pending.setdefault(where, (name, Amounts()))[1].add(amounts)
            if not self._failing:
                self._log.error("usage of keys cannot be written; tried again", reason=str(error))
            self._failing = True

    def _write(self, store: UsageStore, used: _Used, before: str) -> None:
        store.add(used)
        if before != self._swept:
            store.forget(before)
            self._swept = before

    def _write_soon(self) -> None:
        self._timer = None
        self._writing = asyncio.create_task(self._write_now())

    async def _write_now(self) -> None:
        await self.flush()
        if self._pending and self._timer is None:  # refused, or came meanwhile
            self._timer = asyncio.get_running_loop().call_later(FLUSH_S, self._write_soon)
