"""Loads LoRA adapters beside the steps: a thread reads one after the other, the event loop lets steps use them.

Called by the worker loop with the machine's `LoadAdapter` effects; answers each with one event. Decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import structlog
import torch

from cohort.common.engine.models.lora import LoraStore
from cohort.common.errors import ModelError
from cohort.common.machines.effects import LoadAdapter
from cohort.common.machines.events import AdapterFailed, AdapterLoaded

log = structlog.get_logger(__name__)


class LoraLoader:
    def __init__(self, store: LoraStore, tell: Callable[[AdapterLoaded | AdapterFailed], object]) -> None:
        self._store = store
        self._tell = tell
        # One OpenMP thread: the steps have the cores.
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="lora", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def load(self, effect: LoadAdapter) -> None:
        """On the event loop, as all else here but the reading."""
        if effect.instead_of:
            self._store.drop(effect.instead_of)
        task = asyncio.get_running_loop().create_task(self._load(effect), name=f"load adapter {effect.adapter}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Nothing is told any more."""
        for task in self._tasks:
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _load(self, effect: LoadAdapter) -> None:
        name, loop = effect.adapter, asyncio.get_running_loop()
        began_s = loop.time()
        try:
            self._store.hold(await loop.run_in_executor(self._thread, self._store.load, name))
        except Exception as error:  # damaged in any way: the requests that wait for it hear of it
            log.warning(
                "LoRA adapter not loaded", adapter=name, exc_info=not isinstance(error, ModelError), why=str(error)
            )
            self._tell(AdapterFailed(name, str(error) if isinstance(error, ModelError) else repr(error)))
            return
        seconds = round(loop.time() - began_s, 3)
        log.info("LoRA adapter loaded", adapter=name, instead_of=effect.instead_of, seconds=seconds)
        self._tell(AdapterLoaded(name))
