"""A timeline of a running worker, asked for by SIGUSR1: torch's profiler around its steps for 300 ms.

    kill -USR1 PID ─▶ profiler on ─ 300 ms of steps ─▶ off ─▶ <run folder>/<instance>.timeline.json.gz

A trace for https://ui.perfetto.dev: the engine thread's operators and, on a GPU, the whole process's launches, kernels
and copies. Profiled steps are slower, so their length says little: gaps, copies and what runs beside what do.
`worker_process` listens; decides nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog
from torch.profiler import ProfilerActivity, profile

SECONDS = 0.3


def timeline_file(run_dir: Path, instance: str) -> Path:
    return run_dir / f"{instance}.timeline.json.gz"


class Timeline:
    """`engine_thread`: executor with the one thread that launches steps; the profiler sees operators of this alone."""

    def __init__(
        self, file: Path, engine_thread: ThreadPoolExecutor, log: structlog.stdlib.BoundLogger, *, on_gpu: bool
    ) -> None:
        self._file = file
        self._engine_thread = engine_thread
        self._log = log
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self._recording: asyncio.Task[None] | None = None

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let SIGUSR1 record a timeline instead of ending the process."""
        loop.add_signal_handler(signal.SIGUSR1, self.begin)

    def begin(self) -> None:
        """Record a timeline, on the event loop. One at a time."""
        if self._recording is not None and not self._recording.done():
            self._log.warning("no timeline: the one before is not written yet")
            return
        self._recording = asyncio.get_running_loop().create_task(self._record(), name="timeline")

    async def _record(self) -> None:
        in_engine = asyncio.get_running_loop().run_in_executor
        profiler = profile(activities=self._activities)
        part = self._file.with_name(f".{self._file.name}")  # ends as the exporter wants it
        try:
            await in_engine(self._engine_thread, profiler.start)
            await asyncio.sleep(SECONDS)
            await in_engine(self._engine_thread, profiler.stop)  # by the thread that started it
            await asyncio.to_thread(profiler.export_chrome_trace, str(part))
            os.replace(part, self._file)
        except (RuntimeError, OSError) as error:
            self._log.warning("no timeline", error=str(error))
            return
        self._log.warning("timeline written", file=str(self._file), seconds=SECONDS)
