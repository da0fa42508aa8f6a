"""The responses of a running gateway that are kept, behind a thread, swept once a minute.

    add            after an answer is complete, before its client reads that it is; one that is not kept says
                   `store: false`
    conversation   that a new request goes on with
    answer, page of items, lengths, delete

Called by `responses_api.py`. Decides two things: what is read is first charged by its length to the budget of bodies
(`request_bodies.py`), and a database that cannot be used costs the kept responses (503), never an answer.
"""

from __future__ import annotations

import asyncio
import functools
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from cohort.common.clock import Clock
from cohort.common.config import Config
from cohort.common.errors import RequestError
from cohort.common.sqlite_file import OnThread, disk_refuses
from cohort.services.gateway import bounds
from cohort.services.gateway.apis.responses_api_bodies import InputItem
from cohort.services.gateway.apis.responses_api_store import Lengths, ResponseStore, StoredResponse
from cohort.services.gateway.batches.batch_sweeps import SweepGuard, since_boot_s
from cohort.services.gateway.http.request_bodies import Take
from cohort.services.gateway.http.service_headers import printable

SWEEP_S = 60.0
T = TypeVar("T")


class _Answered(msgspec.Struct):
    """Part of a kept response that a conversation continues from."""

    output: list[InputItem]


_item = msgspec.json.Decoder(InputItem)
_answered = msgspec.json.Decoder(_Answered)


class ResponseArchive:
    """Kept responses, usable within `opened`; outside of it nothing is kept."""

    def __init__(self, config: Config, *, owner_share: float, clock: Clock) -> None:
        self.enabled = config.responses.storage_bytes > 0
        self._config = config
        self._owner_share = owner_share
        self._clock = clock
        self._store: OnThread[ResponseStore] | None = None

    @asynccontextmanager
    async def opened(self, database: Path, log: structlog.stdlib.BoundLogger) -> AsyncIterator[None]:
        """Open the database. Raises `ConfigError` for one of another version."""
        self._log = log
        store = await self._open(database) if self.enabled else None
        if store is None:
            yield
            return
        self._store = store
        sweeping = asyncio.create_task(self._sweep(store), name="responses")
        try:
            yield
        finally:
            self._store = None
            sweeping.cancel()
            with suppress(asyncio.CancelledError):
                await sweeping
            await asyncio.to_thread(store.close)

    async def add(self, row: StoredResponse) -> bool:
        """Add a response; return whether it is kept."""
        try:
            return await self._run(lambda store: store.add(row))
        except RequestError:
            return False

    async def lengths(self, response_id: str, owner: str, param: str = "response_id") -> Lengths:
        """Return how long a response is. Raises a 404 `RequestError` that names `param`."""
        now_s = self._clock.wall_s()
        return _known(await self._run(lambda store: store.lengths(response_id, owner, now_s)), response_id, param)

    async def answer(self, response_id: str, owner: str, take: Take) -> bytes:
        """Return a response as it was answered. Raises a 404 `RequestError`, or a 429 of `take`."""
        take((await self.lengths(response_id, owner)).response)
        now_s = self._clock.wall_s()
        return _known(await self._run(lambda store: store.answer(response_id, owner, now_s)), response_id)

    async def delete(self, response_id: str, owner: str) -> None:
        """Delete a response. Raises a 404 `RequestError`."""
        found = await self._run(lambda store: store.delete(response_id, owner, self._clock.wall_s()))
        _known(found or None, response_id)

    async def items(
        self, response_id: str, owner: str, take: Take, *, limit: int, after: str | None, newest_first: bool
    ) -> tuple[list[InputItem], bool]:
        """Return a page of what the response was made from, and whether more follows. Raises as `answer`."""
        now_s = self._clock.wall_s()
        find = functools.partial(ResponseStore.page, limit=limit, after=after, newest_first=newest_first)
        page = _known(await self._run(lambda store: find(store, response_id, owner, now_s)), response_id)
        take(page.bytes)
        items = await self._run(lambda store: [_item.decode(data) for data in store.items(page)])
        return items[::-1] if newest_first else items, page.more

    async def conversation(self, response_id: str, owner: str, take: Take) -> list[InputItem]:
        """Return what the response was made from, and its output. Raises as `answer`."""
        param, now_s = "previous_response_id", self._clock.wall_s()
        take((await self.lengths(response_id, owner, param)).all)
        return _known(
            await self._run(lambda store: _conversation(store, response_id, owner, now_s)), response_id, param
        )

    async def _run(self, work: Callable[[ResponseStore], T]) -> T:
        store = self._store
        if store is None:
            if not self.enabled:
                raise RequestError("This server keeps no responses (responses.storage_bytes is 0).", status=404)
            raise RequestError("Responses cannot be reached now.", status=503, type_="server_error")
        try:
            return await store.run(work)
        except sqlite3.Error as error:
            if not disk_refuses(error):
                raise
            self._log.error("the database of responses cannot be used", reason=str(error))
            raise RequestError(
                "Responses cannot be reached now.", status=503, type_="server_error", retry_after_s=60.0
            ) from error

    async def _open(self, database: Path) -> OnThread[ResponseStore] | None:
        def made() -> ResponseStore:
            return ResponseStore(
                database,
                most=bounds.BOUNDS.responses,
                most_bytes=self._config.responses.storage_bytes,
                owner_share=self._owner_share,
                retention_s=self._config.state.retention_s,
            )

        store = OnThread(made, "response-store")
        try:
            await store.open()
            return store
        except (sqlite3.Error, OSError) as error:
            self._log.error(
                "responses are NOT kept: their database cannot be used",
                database=str(database),
                reason=str(error),
                way_out=f"stop the gateway; move {database.name} away together with its -wal and -shm files; start it",
            )
            return None

    async def _sweep(self, store: OnThread[ResponseStore]) -> None:
        """Delete old responses. As with batches, a clock that jumps deletes nothing early."""
        guard = SweepGuard(await store.run(ResponseStore.swept_at_s))
        while True:
            now_s = self._clock.wall_s()
            if guard.is_plausible(now_s, since_boot_s()):
                with suppress(RequestError):
                    await self._run(functools.partial(ResponseStore.sweep, now_s=now_s))
            await asyncio.sleep(SWEEP_S)


def _conversation(store: ResponseStore, response_id: str, owner: str, now_s: float) -> list[InputItem] | None:
    """Return a response's items and output, decoded on the store's thread, as a conversation may be long."""
    row = store.get(response_id, owner, now_s)
    if row is None:
        return None
    return [*(_item.decode(data) for _, data in row.items), *_answered.decode(row.response).output]


def _known(found: T | None, response_id: str, param: str = "response_id") -> T:
    if found is None:
        raise RequestError(f"There is no response {printable(response_id)!r}.", status=404, param=param)
    return found
