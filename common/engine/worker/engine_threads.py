"""The worker loop's threads and its device: steps run on one that launches them, in order; on a GPU another waits.

    event loop   begin(n) ──────────── begin(n+1) ─────────────┬─ n is computed ────────┬─ …
    engine       └▶ copies, launch(n) ─┴▶ launch(n+1) (GPU)    │                        │
                                          or, on a processor, when n has been computed ─┘
    waiter (GPU)     └▶ waits for n ───────────────────────────┘

torch sees one launching thread (see `worker_process.run_worker`). A step queued after one that fails fails too. Another
thread reads LoRA adapters (`LoraLoader`). Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import structlog
import torch

from cohort.common.devices.inventory import HOST, meminfo_bytes
from cohort.common.engine.cache.kv_copies import KvCopier, StreamCopier
from cohort.common.engine.device.streams import stream_for
from cohort.common.engine.forward.device_steps import Launched
from cohort.common.engine.models.lora import LoraStore
from cohort.common.engine.runner.model_runner import Done, ModelRunner
from cohort.common.engine.step.batch import StepBatch, StepOutput
from cohort.common.engine.worker.iteration_gaps import IterationGaps
from cohort.common.engine.worker.shared_cores import SharedCores
from cohort.common.errors import ModelError
from cohort.common.machines.effects import LoadAdapter
from cohort.common.machines.events import AdapterFailed, AdapterLoaded
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Sequence

log = structlog.get_logger(__name__)

_Result = TypeVar("_Result")


class CpuDevice:
    """Device that computes the steps: the processor on which the worker loop runs, or a GPU."""

    leaves_cpu_free = False
    """Whether a step leaves the processor free: the results of the step before are then sent while it computes. On a
    processor that would only take the step's own time."""

    def __init__(self, runner: ModelRunner, cores: SharedCores | None = None) -> None:
        """`cores`: which threads a step may have; None = always the runner's."""
        self.runner = runner
        self.cores = cores
        self.free_bytes = 0
        """Free device memory at the last `update_free_bytes`, for the worker's reports."""

    def copier(self) -> KvCopier | StreamCopier:
        return KvCopier(self.runner.kv)

    def enter_loop(self) -> None:
        """Prepare the event loop's thread, before the links are opened."""

    async def update_free_bytes(self) -> None:
        self.free_bytes = meminfo_bytes(HOST, "MemAvailable")


class GpuDevice(CpuDevice):
    leaves_cpu_free = True

    def copier(self) -> KvCopier | StreamCopier:
        return StreamCopier(self.runner.kv, self.runner.stream, stream_for(self.runner.device))

    def enter_loop(self) -> None:
        """Make the device current on this thread: UCX detects what it can do, and moves bytes, here."""
        torch.cuda.set_device(self.runner.device)
        torch.cuda.synchronize(self.runner.device)

    async def update_free_bytes(self) -> None:
        """Count in a thread: the driver may take milliseconds to answer, or wait for a lock that a launch holds."""
        free, _ = await asyncio.to_thread(torch.cuda.mem_get_info, self.runner.device)
        self.free_bytes = int(free)


def device_of(runner: ModelRunner, cores: SharedCores | None = None) -> CpuDevice:
    return GpuDevice(runner) if runner.device.type == "cuda" else CpuDevice(runner, cores)


@dataclass(slots=True)
class StepUnderWay:
    plan: IterationPlan
    batch: StepBatch
    sampling: list[Sequence]
    begun_at_s: float
    """Time at which its rows could begin: when it was handed over or, queued after another, when that one had ended."""
    launch_future: asyncio.Future[None]
    """Future that is done once the engine thread has begun it (on a GPU: launched it); work then delays nothing."""
    output_future: asyncio.Future[StepOutput | None]
    """Output; None: it had copies only. Raises what the step raised."""
    drafting_s: float = 0.0
    """Time of a draft model's proposals before it."""


class EngineThreads:
    def __init__(
        self, device: CpuDevice, copier: KvCopier | StreamCopier, gaps: IterationGaps, engine_thread: ThreadPoolExecutor
    ) -> None:
        """`engine_thread`: an executor with one thread; the caller shuts it down."""
        self._device = device
        self._runner = device.runner
        self._copier = copier
        self._gaps = gaps
        self._engine_thread = engine_thread
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="steps")

    def begin(self, plan: IterationPlan, batch: StepBatch, sampling: list[Sequence], now_s: float) -> StepUnderWay:
        """Queue a step after those that were begun before."""
        loop = asyncio.get_running_loop()
        launched = loop.create_future()
        computed: Future[StepOutput | None] = Future()
        computed.set_running_or_notify_cancel()  # the loop's interest in it may end, its computation does not

        def at_it() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_set, launched)

        self._engine_thread.submit(self._launch, plan, batch, at_it, computed)
        output = asyncio.wrap_future(computed)
        if (cores := self._device.cores) is not None:
            cores.begin()
            output.add_done_callback(lambda _: cores.end())
        return StepUnderWay(plan, batch, sampling, now_s, launched, output)

    async def run_between_steps(self, work: Callable[[], _Result]) -> _Result:
        """Run `work` on the engine thread, while no step runs."""
        return await asyncio.get_running_loop().run_in_executor(self._engine_thread, work)

    def close(self) -> None:
        self._waiter.shutdown(wait=True)

    def _launch(
        self, plan: IterationPlan, batch: StepBatch, at_it: Callable[[], None], computed: Future[StepOutput | None]
    ) -> None:
        """Run the plan's rows on the engine thread, after its copies or concurrently with those that allow it."""
        if not self._device.leaves_cpu_free:
            at_it()
        step: Launched | Done | None = None
        try:
            with self._runner.remote_copies(plan.copies), self._copier.around(plan.copies):
                if batch.num_rows:
                    if (cores := self._device.cores) is not None:
                        self._runner.use_threads(cores.step_threads())
                    self._gaps.on_start()
                    try:
                        step = self._runner.launch(batch)
                    except BaseException:
                        self._gaps.on_end()
                        raise
                    if isinstance(step, Done):
                        self._gaps.on_end()
                    at_it()
        except BaseException as error:
            at_it()
            computed.set_exception(error)
            return
        if isinstance(step, Launched):
            self._waiter.submit(self._wait, step, computed)
        else:
            at_it()
            computed.set_result(None if step is None else step.output)

    def _wait(self, step: Launched, computed: Future[StepOutput | None]) -> None:
        try:
            output = step.finish()
        except BaseException as error:
            self._gaps.on_end()
            computed.set_exception(error)
            return
        self._gaps.on_end()
        computed.set_result(output)


def _set(launched: asyncio.Future[None]) -> None:
    if not launched.done():
        launched.set_result(None)


class LoraLoader:
    """Loader of LoRA adapters during steps: a thread reads one after the other, the event loop lets steps use them."""

    def __init__(self, store: LoraStore, report: Callable[[AdapterLoaded | AdapterFailed], object]) -> None:
        self._store = store
        self._report = report
        # One OpenMP thread: the steps have the cores.
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="lora", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._tasks: set[asyncio.Task[None]] = set()

    def load(self, effect: LoadAdapter) -> None:
        """Start a load, on the event loop, as everything here except the reading."""
        if effect.instead_of:
            self._store.drop(effect.instead_of)
        task = asyncio.get_running_loop().create_task(self._load(effect), name=f"load adapter {effect.adapter}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop loads. Nothing is reported any more."""
        for task in self._tasks:
            task.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _load(self, effect: LoadAdapter) -> None:
        name, loop = effect.adapter, asyncio.get_running_loop()
        began_s = loop.time()
        try:
            self._store.hold(await loop.run_in_executor(self._thread, self._store.load, name, effect.folder))
        except Exception as error:  # damaged in any way: the requests that wait for it end with it
            log.warning(
                "LoRA adapter not loaded", adapter=name, exc_info=not isinstance(error, ModelError), why=str(error)
            )
            self._report(AdapterFailed(name, str(error) if isinstance(error, ModelError) else repr(error)))
            return
        seconds = round(loop.time() - began_s, 3)
        log.info("LoRA adapter loaded", adapter=name, instead_of=effect.instead_of, seconds=seconds)
        self._report(AdapterLoaded(name))
