"""The share of the time in which the GPU is idle between two decode steps of a real `WorkerLoop`, and how many of them
were begun ahead.

The loop runs as in a worker, on the loaded model, with a bus on which requests have arrived and which loses what is
sent. Idle is a step's wall time less the recorded step alone, so it holds whatever the loop leaves_cpu_free.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from cohort.common.clock import SystemClock
from cohort.common.codec import encode
from cohort.common.config import Config, load_config
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.worker import worker_loop
from cohort.common.engine.worker.engine_threads import device_of
from cohort.common.engine.worker.worker_process import capacity_of
from cohort.common.machines.effects import WorkerEffect
from cohort.common.machines.events import StepEnded, WorkerEvent
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.machines.worker.worker_state import WorkerSettings, WorkerSetup
from cohort.common.messages import Message, StartSegment
from cohort.common.policies import compose
from cohort.common.process.service import ServiceContext
from cohort.common.transport.memory_bus import MemoryBus, MemoryNetwork
from cohort.common.types import InstanceId, Role
from cohort.services.bench.engine.inside.in_process import start
from cohort.services.bench.gpu_check.engine import steps
from cohort.services.bench.gpu_check.frame.context import Check, rows_of
from cohort.services.bench.gpu_check.frame.guard import NotInstalled

WANTED_IDLE = 0.02
_JOINING = 120  # tokens that the first request gets while the others' prompts are computed
_POLL_S = 0.02


class _Watched(WorkerMachine):
    """Notes when each step has ended."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.ends: list[float] = []

    def handle(self, now_s: float, *events: WorkerEvent) -> list[WorkerEffect]:
        effects = super().handle(now_s, *events)
        self.ends += [time.perf_counter() for event in events if isinstance(event, StepEnded)]
        return effects


class _SilentBus(MemoryBus):
    """Bus that delivers what has arrived, then nothing; sent messages are dropped."""

    def connect(self, peer: InstanceId, endpoint: str) -> None: ...

    def send(self, peer: InstanceId, message: Message) -> None: ...


def run(check: Check, runner: ModelRunner, folder: str) -> None:
    for rows in (16, 64, 256) if check.real else (3,):
        name = f"between steps, {rows} rows"
        check.guard.item(name, partial(_measure, check, runner, folder, name, rows), 15 if rows < 256 else 25)


def _measure(check: Check, runner: ModelRunner, folder: str, name: str, rows: int) -> None:
    context, count = (1024, 120) if check.real else (24, 10)
    alone_s = steps.recorded_s(check, runner, rows_of(runner, rows, 1, context))
    if alone_s is None:
        raise NotInstalled("a recorded step for this many rows")
    config = _serving(check, runner, folder)
    wall_s, chunks, decodes = asyncio.run(_serve(config, runner, rows, context - count, count))
    check.found.measured(
        f"{name}: GPU idle",
        max(0.0, 1 - alone_s / wall_s),
        "of the time",
        at_most=WANTED_IDLE if check.real else None,
        note=f"{wall_s * 1e3:.3f} ms a step, of which {alone_s * 1e3:.3f} recorded; {rows / wall_s:,.0f} tokens/s",
    )
    check.found.measured(f"{name}: steps begun ahead", decodes, "of the steps")
    check.found.measured(f"{name}: steps begun ahead while prompts are computed", chunks, "of the steps")


def _serving(check: Check, runner: ModelRunner, folder: str) -> Config:
    """Return the configuration under which a worker would have loaded this runner."""
    return load_config(
        preset="unified",
        overrides={
            "model": {"path": folder, "weights": "random", "dtype": check.dtype_name},
            "engine": {
                "device": str(check.device),
                "max_rows": runner.max_rows,
                "prefill_chunk": runner.max_step_tokens,
                "max_step_tokens": runner.max_step_tokens,
            },
            "drain_s": 0.1,
            "kv": {"host_memory_bytes": 0, "prefix_caching": False},
        },
    )


async def _serve(config: Config, runner: ModelRunner, rows: int, prompt: int, count: int) -> tuple[float, float, float]:
    """Run the worker's loop over `rows` requests; once all prompts are computed, `count` steps count. Median seconds a
    step; shares of steps begun ahead before and since."""
    draw, highest = random.Random(3), runner.geometry.vocab_size - 1
    prompts = [[draw.randint(3, highest) for _ in range(prompt)] for _ in range(rows)]
    arrived = [start(str(index), each, 2 * count + _JOINING, "gpu-check") for index, each in enumerate(prompts)]
    machine, context, loop, engine = _worker(config, runner, arrived)
    serving = asyncio.create_task(loop.run())
    first, counters, before = 0, machine.counters, (0, 0)
    while not serving.done():
        await asyncio.sleep(_POLL_S)
        if not first and counters.prefill_tokens >= rows * prompt:
            first = len(machine.ends) + 2
            before = (counters.planned_ahead, counters.steps)
        if first and len(machine.ends) >= first + count:
            break
    context.stopping.set()
    try:
        await serving
    finally:
        engine.shutdown(wait=True)
    moments = machine.ends[first : first + count] if first else []
    if len(moments) < 3:
        raise RuntimeError(f"the loop ended after {len(machine.ends)} steps, {counters.prefill_tokens} prompt tokens")
    since = (counters.planned_ahead - before[0]) / max(1, counters.steps - before[1])
    median_s = statistics.median(later - earlier for earlier, later in pairwise(moments))
    return median_s, before[0] / max(1, before[1]), since


def _worker(
    config: Config, runner: ModelRunner, arrived: list[StartSegment]
) -> tuple[_Watched, ServiceContext, worker_loop.WorkerLoop, ThreadPoolExecutor]:
    """Make a worker like `worker_process.run_worker`, without links and recording."""
    bus = _SilentBus(MemoryNetwork(), "gpu-check")
    for message in arrived:
        bus.deliver("manager", encode(message))
    context = ServiceContext(
        config=config,
        instance="gpu-check",
        role="worker",
        incarnation=1,
        bus=bus,
        log=structlog.get_logger("gpu-check"),
        clock=SystemClock(),
        registry=CollectorRegistry(),
        run_dir=Path(tempfile.gettempdir()),
    )
    capacity = capacity_of(config, Role.UNIFIED, runner, context.model_name)
    setup = WorkerSetup("gpu-check", 1, "", "manager", capacity, WorkerSettings.of(config, ()))
    kv = compose.allocation(config, capacity.geometry, capacity.num_blocks, capacity.host_blocks)
    machine = _Watched(setup, compose.iteration(config), kv, random.Random(0))
    engine = ThreadPoolExecutor(1, thread_name_prefix="engine")
    loop = worker_loop.WorkerLoop(context, device_of(runner), {}, machine, machine, None, engine)
    return machine, context, loop, engine
