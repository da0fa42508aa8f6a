"""The gateway's batches as one thing: folder, database, runner and their HTTP routes.

`service.py` opens it before it listens, runs it beside everything else and closes it at the end. Decides nothing.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NoReturn

import structlog
from aiohttp import web

from cohort.common.clock import Clock
from cohort.common.config import Config
from cohort.common.errors import ConfigError
from cohort.common.metrics import MetricFactory
from cohort.services.gateway.batch_api import BatchApi
from cohort.services.gateway.batch_files import BatchFolder
from cohort.services.gateway.batch_runner import AnswerLine, BatchMetrics, BatchRunner
from cohort.services.gateway.batch_store import BatchStore, StoreThread
from cohort.services.gateway.batch_turns import Turns

BUSY_CONCURRENCY = 1
"""Lines of all batches in work while an online request waits for a worker: no further one starts beyond this."""


class Batches:
    """Made by `opened`; usable until that ends."""

    def __init__(self, api: BatchApi, runner: BatchRunner, turns: Turns) -> None:
        self._api = api
        self._runner = runner
        self._turns = turns

    def routes(self) -> list[web.RouteDef]:
        return self._api.routes()

    async def run(self) -> NoReturn:
        """Until cancelled."""
        await self._runner.run()

    def online_placed(self) -> None:
        """No online request waits for a worker any more."""
        self._turns.look_again()

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        config: Config,
        *,
        answer: AnswerLine,
        online_waiting: Callable[[], int],
        clock: Clock,
        metrics: MetricFactory,
        log: structlog.stdlib.BoundLogger,
    ) -> AsyncIterator[Batches]:
        """Raises `ConfigError` when the folder or its database cannot be used."""
        folder = BatchFolder(config.batch, config.gateway.port)
        await asyncio.to_thread(folder.open)
        try:
            store = await asyncio.to_thread(_open_store, folder)
            try:
                known = await store.run(BatchStore.file_ids)
                if strangers := await asyncio.to_thread(folder.remove_strangers, known):
                    log.info("unfinished uploads of an earlier run removed", files=strangers)
                turns = Turns(config.batch.concurrency, BUSY_CONCURRENCY, online_waiting)
                runner = BatchRunner(
                    config=config.batch,
                    folder=folder,
                    store=store,
                    answer=answer,
                    turns=turns,
                    max_line_bytes=config.gateway.max_body_bytes,
                    clock=clock,
                    metrics=BatchMetrics(metrics),
                    log=log,
                )
                api = BatchApi(config=config.batch, folder=folder, store=store, runner=runner, clock=clock, log=log)
                yield cls(api, runner, turns)
            finally:
                await asyncio.to_thread(store.close)
        finally:
            folder.close()


def _open_store(folder: BatchFolder) -> StoreThread:
    try:
        return StoreThread(folder.database)
    except sqlite3.Error as error:
        raise ConfigError(f"batch.folder: {folder.database} cannot be used: {error}") from error
