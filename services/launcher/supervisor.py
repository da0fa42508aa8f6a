"""Keeps the processes of a pipeline running until asked to stop, then ends them in order.

Per process one task:  start ─▶ probe /ready ─▶ wait for its end ─▶ ask the restart policy ─▶ start …
Stopping: stage by stage (gateway, manager, workers, others) SIGTERM, a deadline, SIGKILL; a second request to stop
kills at once. A process that is given up stops the pipeline with exit code 1.

Called by `main`. Decides nothing about restarts (`restart_policy`) and knows nothing about what the processes do.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from cohort.common.http import listeners
from cohort.services.launcher.console import Line, State, View, readable_warning
from cohort.services.launcher.plan import ProcessPlan, StopStage
from cohort.services.launcher.processes.child import Child
from cohort.services.launcher.processes.forks import FROM, Fork, Forks
from cohort.services.launcher.processes.log_follower import LogFollower
from cohort.services.launcher.processes.probe import answers_ok
from cohort.services.launcher.processes.restart_policy import GiveUp, exit_reason
from cohort.services.launcher.processes.supervised import Supervised
from cohort.services.launcher.rolling import RollingRestart
from cohort.services.launcher.run_files import ProcessMark, RestartState, RunFiles, RunFilesError

PROBE_INTERVAL_S = 0.05  # while a process starts; nothing else tells from outside that it is ready
PROBED_AT_ONCE = 16
"""Processes; of more each is asked less often, or the asking would take the cores that they start on."""
PROBE_TIMEOUT_S = 2.0
TEMPLATE_LOG = "workers-template"
REFRESH_INTERVAL_S = 0.5  # of warnings on the console and of the log size check
KILL_TIMEOUT_S = 10.0  # for the kernel to end a killed process
FAILED_STOP_TIMEOUT_S = 3.0  # for each stage when the pipeline is given up: nothing is worth draining for
TAIL_LINES = 12

_ALWAYS = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
_UNLESS_SET = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


class Supervisor:
    def __init__(
        self,
        plans: Sequence[ProcessPlan],
        files: RunFiles,
        console: View,
        *,
        on_change: Callable[[], None],
        python: str = sys.executable,
    ) -> None:
        self._files = files
        self._console = console
        self._on_change = on_change
        self._python = python
        self._processes = [Supervised(plan) for plan in plans]
        self._stopping = asyncio.Event()
        workers = [plan for plan in plans if plan.stage is StopStage.WORKERS]
        modules = [f"cohort.services.{plan.folder}.service" for plan in workers]
        self._forks = Forks(python, modules, files.log_file(TEMPLATE_LOG)) if len(workers) >= FROM else None
        self._probe_interval_s = PROBE_INTERVAL_S * max(1.0, len(plans) / PROBED_AT_ONCE)
        self._rolling = RollingRestart(self._processes, self._stopping, console, on_change)
        self._kill_now = asyncio.Event()
        self._failure = ""
        self._cause = ""
        self._keepers: asyncio.TaskGroup | None = None
        """While processes may be added."""

    @property
    def marks(self) -> dict[str, ProcessMark]:
        """The processes that run now."""
        marks = {}
        for process in self._processes:
            if process.child is not None and process.child.running:
                mark = ProcessMark.of(process.child.pid)
                if mark is not None:
                    marks[process.plan.instance] = mark
        return marks

    @property
    def nodes(self) -> dict[str, str]:
        """All are here."""
        return {}

    @property
    def ready_urls(self) -> dict[str, str]:
        return {process.plan.instance: process.plan.ready_url for process in self._processes}

    @property
    def failure(self) -> str:
        """Why the pipeline was given up; "" if it was not."""
        return self._failure

    @property
    def restart(self) -> RestartState:
        """The rolling restart that runs, or the last one."""
        return self._rolling.state

    def request_restart(self) -> None:
        """Restart the processes that the run folder names, or all, one after the other."""
        if self._forks is not None and not self.restart.running:
            self._forks.renew()
        self._rolling.request(self._files.wanted_restart())

    def request_stop(self) -> None:
        """First call: drain and end. Second: kill."""
        if self._stopping.is_set():
            self._kill_now.set()
        self._stopping.set()

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Until everything has ended. `on_ready` is called once, when all processes are ready."""
        async with asyncio.TaskGroup() as tasks:
            self._keepers = tasks
            for process in self._processes:
                tasks.create_task(self._keep(process))
            watching = (self._announce(on_ready), self._watch_logs(), self._rolling.run())
            helpers = [tasks.create_task(work) for work in watching]
            await self._stopping.wait()
            await self._stop_all()
            self._keepers = None
            await _all([process.done for process in self._processes])
            for task in helpers:
                task.cancel()
            if self._forks is not None:
                self._forks.end()
        return 1 if self._failure else 0

    # -- processes that come and go ------------------------------------------------------------------------------

    async def add(self, plan: ProcessPlan, timeout_s: float) -> None:
        """Start another process beside the others; returns when it is ready. Raises `RunFilesError` when it ends before
        that or takes longer: then it is gone."""
        if self._keepers is None or self._stopping.is_set():
            raise RunFilesError("the pipeline is stopping")
        process = Supervised(plan, added=True)
        self._processes.append(process)
        self._console.add(Line(plan.instance, plan.port, self._files.log_file(plan.instance)))
        self._keepers.create_task(self._keep(process))
        await wait_any((process.ready, process.done), timeout_s)
        if not process.ready.is_set():
            why = process.failure or f"{plan.instance} is not ready after {timeout_s:.0f} s"
            await self.retire(plan.instance)
            raise RunFilesError(why)
        self._on_change()

    async def retire(self, instance: str) -> None:
        """Ask one process to drain and end, for good; returns when it is gone. Killed where it does not end in time."""
        process = next((each for each in self._processes if each.plan.instance == instance), None)
        if process is None:
            raise RunFilesError(f"no process named {instance}")
        process.leaving.set()
        if process.running and process.child is not None:
            self._console.update(instance, State.STOPPING)
            process.child.terminate()
        await wait_any((process.done, self._kill_now), process.plan.stop_timeout_s)
        if not process.done.is_set() and process.child is not None:
            process.child.kill()
            await wait_any((process.done,), KILL_TIMEOUT_S)
        if process.done.is_set() and not self._stopping.is_set():
            self._processes.remove(process)
            self._console.remove(instance)
        self._on_change()

    # -- keeping one process running -----------------------------------------------------------------------------

    async def _keep(self, process: Supervised) -> None:
        plan = process.plan
        self._files.start_log(plan.instance)
        try:
            while not self._stopping.is_set() and not process.leaving.is_set():
                delay_s = await self._run_once(process)
                if delay_s is None:
                    return
                await wait_any((self._stopping, process.leaving), delay_s)
        finally:
            for listener in process.listeners:
                listener.close()
            process.done.set()

    async def _run_once(self, process: Supervised) -> float | None:
        """One life of the process. Returns the delay before the next, or None if there is none."""
        plan = process.plan
        command = plan.command(self._python, self._files.config_file, self._files.folder)
        child = await self._begin(process, command)
        process.child, process.renewed = child, False
        process.policy.started()
        self._console.update(plan.instance, State.STARTING, pid=child.pid)
        self._on_change()
        probe = asyncio.create_task(self._until_ready(process))
        try:
            code = await child.wait()
        finally:
            probe.cancel()
        process.ready.clear()
        if self._stopping.is_set() or process.leaving.is_set():
            ended_by_us = code in (0, -signal.SIGTERM) or (process.killed and code == -signal.SIGKILL)
            note = "" if ended_by_us else exit_reason(code)
            self._console.update(plan.instance, State.STOPPED, note=note)
            return None
        if process.renewed:
            self._console.update(plan.instance, State.RESTARTING, note="(asked to)")
            self._on_change()
            return 0.0
        match process.policy.ended(time.monotonic(), code, relieved=self._is_relieved(process)):
            case GiveUp(reason):
                self._console.update(plan.instance, State.FAILED, note=reason)
                process.failure = f"{plan.instance}: {reason}"
                if not process.added:
                    self._give_up(process, reason)
                return None
            case restart:
                when = f"in {restart.delay_s:.1f} s" if restart.delay_s else "at once"
                note = f"({restart.reason}; again {when})"
                self._console.update(plan.instance, State.RESTARTING, note=note)
                self._on_change()
                return restart.delay_s

    async def _begin(self, process: Supervised, command: Sequence[str]) -> Child | Fork:
        plan = process.plan
        log, environment = self._files.log_file(plan.instance), _environment(plan)
        if self._forks is not None and plan.stage is StopStage.WORKERS:
            return await self._forks.child(command, log, environment)
        held = self._held(process)
        environment = {**environment, **listeners.environment(held)}
        return Child(command, log, environment, [each.fileno() for each in held])

    @staticmethod
    def _held(process: Supervised) -> list[socket.socket]:
        """The sockets that it serves and the launcher keeps; none where they cannot be had: then it says why itself."""
        if process.plan.held and not process.listeners:
            with contextlib.suppress(OSError):
                process.listeners = listeners.bound_everywhere(process.plan.host, process.plan.port)
        return process.listeners

    def _is_relieved(self, process: Supervised) -> bool:
        """A worker whose requests go on at another one."""
        others = [other for other in self._processes if other is not process and other.ready.is_set()]
        return process.plan.stage is StopStage.WORKERS and any(o.plan.stage is StopStage.WORKERS for o in others)

    async def _until_ready(self, process: Supervised) -> None:
        """Ends when the process is ready, or is cancelled when it ends before."""
        while not await answers_ok(process.plan.ready_url, PROBE_TIMEOUT_S):  # noqa: ASYNC110
            await asyncio.sleep(self._probe_interval_s)
        process.policy.became_ready(time.monotonic())
        process.ready.set()
        if not self._stopping.is_set():
            self._console.update(process.plan.instance, State.READY)

    def _give_up(self, process: Supervised, reason: str) -> None:
        if not self._failure:
            self._failure = f"{process.plan.instance}: {reason}"
            self._cause = show_failure(self._console, self._files, process.plan.instance, self._failure)
        self._stopping.set()

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        while not all(process.ready.is_set() for process in self._processes):
            for process in self._processes:
                await process.ready.wait()
        if not self._stopping.is_set():
            on_ready()

    async def _watch_logs(self) -> None:
        await echo_logs(self._files, self._console, self._instances, self._stopping)

    def _instances(self) -> list[str]:
        return [process.plan.instance for process in self._processes]

    # -- ending ---------------------------------------------------------------------------------------------------

    async def _stop_all(self) -> None:
        self._console.settle()
        if not self._failure:
            self._console.say("draining: running requests finish; Ctrl-C again ends at once")
        for stage in StopStage:
            group = [process for process in self._processes if process.plan.stage is stage]
            await self._stop(group)
        if self._failure:
            self._console.say(f"given up: {self._cause}", style="red")

    async def _stop(self, group: Sequence[Supervised]) -> None:
        for process in group:
            if process.running and process.child is not None:
                self._console.update(process.plan.instance, State.STOPPING)
                process.child.terminate()
        if group and not self._kill_now.is_set():
            drain_s = max(process.plan.stop_timeout_s for process in group)
            timeout_s = FAILED_STOP_TIMEOUT_S if self._failure else drain_s
            await wait_all_or(self._kill_now, [process.done for process in group], timeout_s)
        for process in group:
            if process.running and process.child is not None:
                if not self._kill_now.is_set():
                    self._console.say(f"{process.plan.instance} did not end in time; killed", style="red")
                process.killed = True
                process.child.kill()
        await wait_all_or(None, [process.done for process in group], KILL_TIMEOUT_S)


def _environment(plan: ProcessPlan) -> Mapping[str, str]:
    """The process's thread count comes from the configuration, not from the shell that started the launcher."""
    return {**_UNLESS_SET, **os.environ, **plan.environment, **_ALWAYS}


def show_failure(console: View, files: RunFiles, instance: str, failure: str) -> str:
    """Why the pipeline is given up, and what the process said last; the gist of both."""
    console.settle()
    console.say(f"{failure}; the end of {files.log_file(instance)}:", style="red")
    gist = failure
    for line in files.log_tail(instance, TAIL_LINES):
        console.say(f"  {line}")
        if (said := readable_warning(line)).startswith(("error: ", "critical: ")):
            gist = f"{instance}: {said.partition(': ')[2]}"
    return gist


async def wait_any(events: Sequence[asyncio.Event], timeout_s: float) -> None:
    """Until one of the events or the deadline."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def wait_all_or(abort: asyncio.Event | None, events: Sequence[asyncio.Event], timeout_s: float) -> None:
    """Until all events, the abort event, or the deadline."""
    everything = asyncio.ensure_future(_all(events))
    waiting: set[asyncio.Future[None] | asyncio.Task[bool]] = {everything}
    if abort is not None:
        waiting.add(asyncio.ensure_future(abort.wait()))
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        await event.wait()


async def echo_logs(
    files: RunFiles, view: View, instances: Callable[[], Sequence[str]], stopping: asyncio.Event
) -> None:
    """Warnings of these processes, with their names, for as long as it runs; and no log grows without end."""
    followers: dict[str, LogFollower] = {}
    while True:
        await asyncio.sleep(REFRESH_INTERVAL_S)
        names = instances()
        followers = {name: followers.get(name) or LogFollower(files.log_file(name)) for name in names}
        for instance, follower in followers.items():
            for line in follower.new_lines():
                if not stopping.is_set():  # processes that lose each other while ending are no news
                    view.echo_log(instance, line)
            files.limit_log(instance)
