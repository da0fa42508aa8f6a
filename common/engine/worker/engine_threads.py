"""The threads that steps run on: one launches them, in order; on a GPU another waits for them.

    event loop   begin(n) ──────────── begin(n+1) ─────────────┬─ n is computed ────────┬─ …
    engine       └▶ copies, launch(n) ─┴▶ launch(n+1) (GPU)    │                        │
                                          or, on a processor, when n has been computed ─┘
    waiter (GPU)     └▶ waits for n ───────────────────────────┘

Used by the worker loop. torch sees one launching thread (see `worker_process.run_worker`). A step begun behind one that
fails fails too. Decides nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from cohort.common.engine.cache.kv_copies import KvCopier
from cohort.common.engine.cache.stream_copies import StreamCopier
from cohort.common.engine.forward.device_steps import Launched
from cohort.common.engine.runner.model_runner import Done
from cohort.common.engine.step.batch import StepBatch, StepOutput
from cohort.common.engine.worker.hosts import CpuHost
from cohort.common.engine.worker.iteration_gaps import IterationGaps
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Sequence

_Result = TypeVar("_Result")


@dataclass(slots=True)
class StepUnderWay:
    """A step that the engine was given."""

    plan: IterationPlan
    batch: StepBatch
    sampling: list[Sequence]
    begun_s: float
    """When its rows could begin: when it was handed over or, behind another, when that one had ended."""
    launched: asyncio.Future[None]
    """The engine thread is at it, and on a GPU has launched it: from now on the event loop's work holds nothing up."""
    computed: asyncio.Future[StepOutput | None]
    """None: it had copies only. Raises what the step raised."""
    drafting_s: float = 0.0
    """What a draft model took before it."""


class EngineThreads:
    def __init__(
        self, host: CpuHost, copier: KvCopier | StreamCopier, gaps: IterationGaps, engine: ThreadPoolExecutor
    ) -> None:
        """`engine`: one thread, its maker's to end."""
        self._host = host
        self._runner = host.runner
        self._copier = copier
        self._gaps = gaps
        self._engine = engine
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="steps")

    def begin(self, plan: IterationPlan, batch: StepBatch, sampling: list[Sequence], now_s: float) -> StepUnderWay:
        """Behind the steps that were begun before."""
        loop = asyncio.get_running_loop()
        launched = loop.create_future()
        computed: Future[StepOutput | None] = Future()
        computed.set_running_or_notify_cancel()  # the loop's interest in it may end, its computation does not

        def at_it() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(_set, launched)

        self._engine.submit(self._launch, plan, batch, at_it, computed)
        return StepUnderWay(plan, batch, sampling, now_s, launched, asyncio.wrap_future(computed))

    async def between(self, work: Callable[[], _Result]) -> _Result:
        """Something else on the engine thread, while no step runs."""
        return await asyncio.get_running_loop().run_in_executor(self._engine, work)

    def close(self) -> None:
        self._waiter.shutdown(wait=True)

    def _launch(
        self, plan: IterationPlan, batch: StepBatch, at_it: Callable[[], None], computed: Future[StepOutput | None]
    ) -> None:
        """On the engine thread: the plan's rows, after its copies or beside those that may run so."""
        if not self._host.overlaps:
            at_it()
        step: Launched | Done | None = None
        try:
            with self._runner.copies_elsewhere(plan.copies), self._copier.around(plan.copies):
                if batch.num_rows:
                    self._gaps.begun()
                    try:
                        step = self._runner.launch(batch)
                    except BaseException:
                        self._gaps.ended()
                        raise
                    if isinstance(step, Done):
                        self._gaps.ended()
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
            self._gaps.ended()
            computed.set_exception(error)
            return
        self._gaps.ended()
        computed.set_result(output)


def _set(launched: asyncio.Future[None]) -> None:
    if not launched.done():
        launched.set_result(None)
