"""The gateway's batches as one thing: folder, database, runner and their HTTP routes.

Opened by `service.py` before it listens. An unusable database costs files and batches (503), not the gateway.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import NoReturn

import structlog
from aiohttp import web

from cohort.common.clock import Clock
from cohort.common.config import Config
from cohort.common.errors import ConfigError, RequestError
from cohort.common.process.metrics import MetricFactory
from cohort.services.gateway.batches.batch_api import BatchApi
from cohort.services.gateway.batches.batch_files import BatchFolder, folder_of
from cohort.services.gateway.batches.batch_lines import AnswerLine
from cohort.services.gateway.batches.batch_quota import Quota
from cohort.services.gateway.batches.batch_runner import SWEEP_S, BatchContext, BatchMetrics, BatchRunner
from cohort.services.gateway.batches.batch_store import BatchStore, StoreThread
from cohort.services.gateway.batches.batch_sweeps import since_boot_s
from cohort.services.gateway.batches.batch_turns import Turns

BUSY_CONCURRENCY = 1
"""Lines of all batches in work while an online request waits for a worker: no further one starts beyond this."""


class Batches:
    """Files and batches of a gateway, open within `opened`. Without `work` they are answered with 503."""

    def __init__(self, work: tuple[BatchApi, BatchRunner] | None) -> None:
        self._work = work

    def routes(self) -> list[web.RouteDef]:
        if self._work is not None:
            return self._work[0].routes()
        return [
            web.route("*", path + rest, _unavailable)
            for path in ("/v1/files", "/v1/batches")
            for rest in ("", "/{rest:.*}")
        ]

    async def run(self) -> NoReturn:
        if self._work is not None:
            await self._work[1].run()
        await asyncio.Event().wait()
        raise AssertionError("unreachable: nothing sets the event")

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        config: Config,
        *,
        answer: AnswerLine,
        instance: str,
        owner_share: float,
        online_waiting: Callable[[], int],
        online_placed: asyncio.Event,
        clock: Clock,
        metrics: MetricFactory,
        log: structlog.stdlib.BoundLogger,
    ) -> AsyncIterator[Batches]:
        """Open folder and database. `online_placed` is set whenever no online request waits any more. Raises
        `ConfigError` for an unusable folder or another version."""
        folder = BatchFolder(folder_of(config, instance), shared=config.gateway.processes > 1)
        own_metrics = BatchMetrics(metrics)
        own_metrics.usable().set(0)
        await asyncio.to_thread(folder.open)
        try:
            store = await _open_store(folder, log)
            await asyncio.to_thread(folder.admit_others)
            if store is None:
                yield cls(None)
                return
            try:
                own_metrics.usable().set(1)
                turns = Turns(config.batch.concurrency, BUSY_CONCURRENCY, online_waiting, online_placed)
                quota = Quota(config.batch.storage_bytes, owner_share=owner_share, gateways=config.gateway.processes)
                context = BatchContext(folder, store, quota, config.state.retention_s, clock, log)
                bound = config.gateway.max_body_bytes
                runner = BatchRunner(context, answer, turns, own_metrics, max_line_bytes=bound, elapsed_s=since_boot_s)
                api = BatchApi(context, runner, config.gateway)
                async with _abandoned_parts_removed(folder, log):
                    yield cls((api, runner))
            finally:
                await asyncio.to_thread(store.close)
        finally:
            folder.close()


async def _open_store(folder: BatchFolder, log: structlog.stdlib.BoundLogger) -> StoreThread | None:
    """Open the store; None, with nothing touched, if the database is damaged or cannot be used."""
    store = StoreThread(folder.database)
    try:
        if folder.is_exclusive:
            await _clean_up(folder, store, log)
        return store
    except sqlite3.Error as error:
        await asyncio.to_thread(store.close)
        log.error(
            "files and batches are NOT served: their database cannot be used",
            database=str(folder.database),
            reason=str(error),
            way_out=f"stop the gateway; repair or restore {folder.database.name}, or move it away together with its "
            f"-wal and -shm files; start again. Beside a new database, contents are moved to {folder.lost.name}/, not "
            "deleted",
        )
        return None
    except OSError as error:
        await asyncio.to_thread(store.close)
        raise ConfigError(f"state.folder: {folder.path} cannot be used: {error.strerror}") from error


@asynccontextmanager
async def _abandoned_parts_removed(folder: BatchFolder, log: structlog.stdlib.BoundLogger) -> AsyncIterator[None]:
    """Remove the parts of killed gateways now and then within the block, as others go on."""

    async def sweep() -> NoReturn:
        while True:
            with suppress(OSError):  # uploads say what is wrong with the disk
                if removed := await asyncio.to_thread(folder.remove_abandoned_parts):
                    log.info("unfinished uploads of a gateway that ended removed", files=removed)
            await asyncio.sleep(SWEEP_S)

    if not folder.shared:
        yield
        return
    sweeping = asyncio.create_task(sweep(), name="left uploads")
    try:
        yield
    finally:
        sweeping.cancel()
        await asyncio.gather(sweeping, return_exceptions=True)


async def _clean_up(folder: BatchFolder, store: StoreThread, log: structlog.stdlib.BoundLogger) -> None:
    def read(store: BatchStore) -> tuple[set[str], bool, bool]:
        return store.file_ids(), store.held_files(), store.checked

    known, held_files, checked = await store.run(read)
    found = await asyncio.to_thread(folder.clean_up, known, held_files=held_files, sound=checked)
    if found.removed:
        log.info("unfinished uploads of an earlier run removed", files=found.removed)
    if found.lost:
        log.warning(
            "the batch database is new: contents of an earlier one were moved, and will not be read or deleted",
            files=found.lost,
            folder=str(folder.lost),
        )
    if found.retained or found.foreign:
        log.warning(
            "files in the folder of batches that the database does not name: left alone",
            contents=found.retained,
            others=found.foreign,
        )


async def _unavailable(_: web.Request) -> NoReturn:
    raise RequestError(
        "Files and batches are not available: the server's database for them cannot be used. Its operator finds the "
        "reason in the gateway's log.",
        status=503,
        type_="server_error",
    )
