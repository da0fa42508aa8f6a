"""A rolling restart: the processes of a running pipeline ended and started again, one after the other.

    monitor, predictor ─▶ manager ─▶ each worker ─▶ each gateway         each: drain, end, start, ready; then the next

Each goes as in an orderly stop: a worker's requests go on at other workers, a gateway's clients keep their connections
until their responses are complete, and new ones wait at the port or find another gateway. A process that does not come
back stops the restart, so a release that cannot start costs one process and no more. Part of `Supervisor`, which starts
what has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from cohort.services.launcher.console import State
from cohort.services.launcher.hosts import Pipeline, Supervised
from cohort.services.launcher.plan import StopStage
from cohort.services.launcher.run_files import RestartState

_ORDER = (StopStage.OTHERS, StopStage.MANAGER, StopStage.WORKERS, StopStage.GATEWAY)
READY_TIMEOUT_S = 300.0
"""The longest a process may take to be ready again; a large model is read meanwhile."""


class RollingRestart:
    def __init__(self, pipeline: Pipeline) -> None:
        self._processes, self._stopping = pipeline.processes, pipeline.stopping
        self._console, self._on_change = pipeline.console, pipeline.on_change
        self._requested = asyncio.Event()
        self.state = RestartState(0, [], [])

    def request(self, instances: Sequence[str]) -> None:
        """Restart these processes, or all if none is named. Ignored while a restart runs."""
        if self.state.running or self._stopping.is_set():
            return
        ordered = [
            process.plan.instance for stage in _ORDER for process in self._processes if process.plan.stage is stage
        ]
        remaining = [name for name in ordered if not instances or name in instances]
        self.state = RestartState(self.state.number + 1, [], remaining)
        self._requested.set()
        self._on_change()

    async def run(self) -> None:
        """Perform requested restarts until cancelled."""
        while True:
            await self._requested.wait()
            self._requested.clear()
            await self._restart_all()

    async def _restart_all(self) -> None:
        by_name = {process.plan.instance: process for process in self._processes}
        while self.state.running and not self._stopping.is_set():
            name = self.state.left[0]
            failure = await self._restart(by_name[name])
            done, remaining = self.state.done, self.state.left
            if failure:
                self._console.print_line(f"the rolling restart has stopped: {failure}", style="red")
                self.state = RestartState(self.state.number, done, remaining, failure)
            else:
                self.state = RestartState(self.state.number, [*done, name], remaining[1:])
            self._on_change()

    async def _restart(self, process: Supervised) -> str:
        """Restart one process; return why it failed, or "" once it is ready again."""
        plan = process.plan
        if process.child is None or not process.running:
            return f"{plan.instance} does not run"
        child = process.child
        process.ready.clear()
        process.renewed = True
        self._console.update(plan.instance, State.STOPPING, note="(to be started again)")
        (child.hand_over if plan.hands_over else child.terminate)()
        try:
            async with asyncio.timeout(plan.stop_timeout_s):
                await child.wait()
        except TimeoutError:
            self._console.print_line(f"{plan.instance} did not end in time; killed", style="red")
            child.kill()
        try:
            async with asyncio.timeout(READY_TIMEOUT_S):
                await process.ready.wait()
        except TimeoutError:
            return f"{plan.instance} was not ready again within {READY_TIMEOUT_S:.0f} s"
        return ""
