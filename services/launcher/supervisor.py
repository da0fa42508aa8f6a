"""Keeps the processes of a pipeline running until asked to stop, then ends them in order.

Per process one task:  begin ─▶ probe /ready ─▶ wait for its end ─▶ ask the restart policy ─▶ begin …
Stopping: stage by stage (gateway, manager, workers, others) SIGTERM, a deadline, SIGKILL; a second request to stop
kills at once. A process that is given up stops the pipeline with exit code 1; one that was added later only itself.

Called by `main`. Where processes run a back end knows (`hosts`): here, or on the nodes of a cluster. Decides nothing
about restarts (`restart_policy`) and knows nothing about what the processes do.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Sequence
from urllib.parse import urlsplit

from cohort.common.errors import CohortError
from cohort.common.process.activity import Activity
from cohort.services.launcher.console import Line, LogFollower, State, readable, readable_warning
from cohort.services.launcher.hosts import HostLost, Hosts, NotStarted, Pipeline, Supervised
from cohort.services.launcher.plan import ProcessPlan, StopStage
from cohort.services.launcher.processes.probe import answers_ok
from cohort.services.launcher.processes.restart_policy import GiveUp, RestartPolicy, exit_reason
from cohort.services.launcher.rolling import RollingRestart
from cohort.services.launcher.run_files import (
    LAUNCHER_LOG,
    TEMPLATE_LOG,
    ProcessMark,
    RestartState,
    RunFilesError,
    is_stopped,
)

PROBE_INTERVAL_S = 0.05  # while a process starts; nothing else shows from outside that it is ready
PROBED_AT_ONCE = 16
"""Processes; of more each is probed less often, or the probes would take the cores that they start on."""
PROBE_TIMEOUT_S = 2.0
REFRESH_INTERVAL_S = 0.5  # of warnings on the console and of the log size check
STOPPED_S = 2.0  # that a process stays stopped by a signal: its clients wait
KILL_TIMEOUT_S = 10.0  # for the kernel to end a killed process
FAILED_STOP_TIMEOUT_S = 3.0  # for each stage when the pipeline is given up: nothing is worth draining for
START_ALONE_S = 60.0
"""Longest wait of a worker that starts again for another one that does, and may hang."""
LOST_DELAY_S = 0.1  # before what lost its host begins again
TAIL_LINES = 12


class Supervisor:
    def __init__(self, pipeline: Pipeline, hosts: Hosts, plans: Sequence[ProcessPlan]) -> None:
        self._pipeline = pipeline
        self._hosts = hosts
        self._files, self._console, self._on_change = pipeline.files, pipeline.console, pipeline.on_change
        self._stopping, self._kill_now = pipeline.stopping, pipeline.kill_now
        self._processes = pipeline.processes
        self._processes += [Supervised(plan) for plan in plans]
        self._rolling = RollingRestart(pipeline)
        self.failure = ""
        """Reason why the pipeline was given up; "" if it was not."""
        self._cause = ""
        self._defect: Exception | None = None
        self._tasks: asyncio.TaskGroup | None = None
        """Task group, while processes may be added."""

    @property
    def marks(self) -> dict[str, ProcessMark]:
        """The processes of this machine that run now."""
        marks = {}
        for process in self._processes:
            if process.child is not None and process.child.running and not process.node:
                mark = ProcessMark.of(process.child.pid)
                if mark is not None:
                    marks[process.plan.instance] = mark
        return marks

    @property
    def nodes(self) -> dict[str, str]:
        """Node of each process, as far as known; empty on one machine."""
        return {process.plan.instance: process.node for process in self._processes if process.node}

    @property
    def ready_urls(self) -> dict[str, str]:
        return {process.plan.instance: process.ready_url for process in self._processes}

    @property
    def restart(self) -> RestartState:
        """The rolling restart that runs, or the last one."""
        return self._rolling.state

    def request_restart(self) -> None:
        """Restart the processes that the run folder names, or all, one after the other."""
        if self._hosts.no_restart:
            self._console.print_line(self._hosts.no_restart, style="yellow")
            return
        if not self.restart.running:
            self._hosts.renew()
        self._rolling.request(self._files.wanted_restart())

    def request_stop(self) -> None:
        """Drain at the first call, then end; kill at the second."""
        if self._stopping.is_set():
            self._kill_now.set()
        self._stopping.set()

    async def run(self, on_ready: Callable[[], None]) -> int:
        """Run until everything has ended and nothing of it is left. `on_ready` is called once, when all are ready."""
        try:
            for process in self._processes:
                self._files.start_log(process.plan.instance)
            self._hosts.request_places(self._processes)
            async with asyncio.TaskGroup() as self._tasks:
                for process in self._processes:
                    process.task = self._tasks.create_task(self._guarded(self._supervise(process)))
                watching = [self._announce(on_ready), self._watch_stopped(), self._rolling.run()]
                watching += [] if self._files.logs_to_stdout else [self._watch_logs()]
                helpers = [self._tasks.create_task(self._guarded(work)) for work in watching]
                await self._stopping.wait()
                await self._stop_all()
                for task in (*helpers, *(process.task for process in self._processes)):
                    if task is not None:
                        task.cancel()
        finally:
            self._tasks = None
            for process in self._processes:
                self._hosts.release(process)
            self._hosts.close()
        if self._defect is not None:
            raise self._defect
        return 1 if self.failure else 0

    async def _guarded(self, work: Coroutine[None, None, None]) -> None:
        """Run a task; if it fails by a defect here, stop the pipeline."""
        try:
            await work
        except Exception as defect:
            self._defect = defect
            self.failure = self.failure or "the launcher failed"
            self._cause = self._cause or f"{self.failure}: {defect!r}"
            self._stopping.set()

    # -- processes that come and go ------------------------------------------------------------------------------

    async def add(self, plan: ProcessPlan, timeout_s: float) -> None:
        """Start another process beside the others; returns when it is ready. Raises `CohortError` when it cannot be
        had, ends before it is ready or takes longer: then nothing of it stays."""
        if self._tasks is None or self._stopping.is_set():
            raise RunFilesError("the pipeline is stopping")
        process = Supervised(plan, added=True)
        self._processes.append(process)
        self._console.add(Line(plan.instance, plan.port, self._files.log_file(plan.instance)))
        self._files.start_log(plan.instance)
        try:
            self._hosts.request_places([process])
        except CohortError:
            self._forget(process)
            raise
        process.task = self._tasks.create_task(self._guarded(self._supervise(process)))
        await wait_any((process.ready, process.done, self._stopping), timeout_s)
        if self._stopping.is_set():
            raise RunFilesError("the pipeline is stopping")  # and ends it with the others
        if not process.ready.is_set():
            why = process.failure or f"{plan.instance} is not ready after {timeout_s:.0f} s"
            await self.retire(plan.instance)
            raise RunFilesError(why)
        self._on_change()

    async def retire(self, instance: str) -> None:
        """Ask one process to drain and end, for good; returns when it is gone. By force where it does not end in time,
        and where nobody answers for it: its node may be lost, and nobody know it yet."""
        process = next((each for each in self._processes if each.plan.instance == instance), None)
        if process is None:
            raise RunFilesError(f"no process named {instance}")
        process.leaving.set()
        self._terminate(process)
        await wait_any((process.done, self._kill_now), process.plan.stop_timeout_s)
        if not process.done.is_set():
            self._kill(process)
            await wait_any((process.done,), KILL_TIMEOUT_S)
        if process.task is not None:
            process.task.cancel()
            await asyncio.gather(process.task, return_exceptions=True)
        self._forget(process)

    def _forget(self, process: Supervised) -> None:
        self._hosts.release(process)
        if not self._stopping.is_set():
            self._processes.remove(process)
            self._console.remove(process.plan.instance)
        self._on_change()

    # -- keeping one process running -----------------------------------------------------------------------------

    async def _supervise(self, process: Supervised) -> None:
        try:
            while not self._ends(process):
                delay_s = await self._run_once(process)
                if delay_s is None:
                    return
                await wait_any((self._stopping, process.leaving), delay_s)
                await self._until_cores_are_free(process)
        finally:
            process.done.set()
            if process.failure and process.added:
                self._hosts.release(process)

    async def _until_cores_are_free(self, process: Supervised) -> None:
        """Wait while a worker that starts again needs the same cores and no worker serves: both together would take
        twice as long, and no request goes on meanwhile."""
        deadline_s = time.monotonic() + START_ALONE_S
        while process.plan.starts_alone and not self._is_replaced(process) and time.monotonic() < deadline_s:
            starting = [each for each in self._processes if each.plan.starts_alone and each.running]
            if not starting or self._ends(process):
                return
            await wait_any((starting[0].ready, self._stopping, process.leaving), PROBE_INTERVAL_S)

    def _ends(self, process: Supervised) -> bool:
        return self._stopping.is_set() or process.leaving.is_set()

    async def _run_once(self, process: Supervised) -> float | None:
        """Run one life of the process. Returns the delay before the next, or None if there is none."""
        name = process.plan.instance
        process.renewed = False
        try:
            try:
                process.child = await self._hosts.begin(process)
            except OSError as error:  # no memory, place or descriptor for it now
                code, refused = os.EX_OSERR, f"not started: {error}"
            else:
                code, refused = await self._until_ended(process), ""
        except (HostLost, NotStarted) as lost:
            if self._ends(process):
                self._console.update(name, State.STOPPED, note="lost")
                return None
            if isinstance(lost, NotStarted):
                self._give_up(process, str(lost))
                return None
            process.policy = RestartPolicy()  # where it begins again it has proven nothing
            self._console.update(name, State.WAITING if lost.waits else State.RESTARTING, note=f"({lost})")
            self._on_change()
            return LOST_DELAY_S
        if self._ends(process):
            ended_by_us = code in (0, -signal.SIGTERM) or (process.killed and code == -signal.SIGKILL)
            self._console.update(name, State.STOPPED, note="" if ended_by_us else exit_reason(code))
            return None
        if process.renewed:
            self._console.update(name, State.RESTARTING, note="(asked to)")
            self._on_change()
            return 0.0
        match process.policy.ended(time.monotonic(), code, relieved=self._is_replaced(process)):
            case GiveUp(reason):
                self._give_up(process, refused or reason)
                return None
            case restart:
                when = f"in {restart.delay_s:.1f} s" if restart.delay_s else "at once"
                self._console.update(name, State.RESTARTING, note=f"({refused or restart.reason}; again {when})")
                self._on_change()
                return restart.delay_s

    async def _until_ended(self, process: Supervised) -> int:
        child = process.child
        assert child is not None
        process.policy.started()
        port = urlsplit(process.ready_url).port
        self._console.update(process.plan.instance, State.STARTING, pid=child.pid, node=process.node, port=port)
        self._on_change()
        if process.leaving.is_set():  # since it was being begun
            self._terminate(process)
        probe = asyncio.create_task(self._until_ready(process))
        try:
            return await child.wait()
        finally:
            probe.cancel()
            process.ready.clear()

    def _is_replaced(self, process: Supervised) -> bool:
        """Return whether another worker takes over this one's requests."""
        others = [other for other in self._processes if other is not process and other.ready.is_set()]
        return process.plan.stage is StopStage.WORKERS and any(o.plan.stage is StopStage.WORKERS for o in others)

    async def _until_ready(self, process: Supervised) -> None:
        """Wait until the process is ready; cancelled when it ends before."""
        pause_s = PROBE_INTERVAL_S * max(1.0, len(self._processes) / PROBED_AT_ONCE)
        while not await answers_ok(process.ready_url, PROBE_TIMEOUT_S):  # noqa: ASYNC110
            await asyncio.sleep(pause_s)
        process.policy.became_ready(time.monotonic())
        process.ready.set()
        if not self._stopping.is_set():
            self._console.update(process.plan.instance, State.READY)

    def _give_up(self, process: Supervised, reason: str) -> None:
        name = process.plan.instance
        self._console.update(name, State.FAILED, note=reason)
        process.failure = f"{name} on {process.node}: {reason}" if process.node else f"{name}: {reason}"
        if process.added:
            self._on_change()
            return
        if not self.failure:
            self.failure = self._cause = process.failure
            self._show_failure(name)
        self._stopping.set()

    def _show_failure(self, instance: str) -> None:
        """Print why the pipeline is given up, and the end of the process's log; the gist of both is the cause."""
        self._console.freeze()
        self._console.print_line(f"{self.failure}; the end of {self._files.log_file(instance)}:", style="red")
        for line in self._files.log_tail(instance, TAIL_LINES):
            self._console.print_line(f"  {readable(line)}")
            if (text := readable_warning(line)).startswith(("error: ", "critical: ")):
                self._cause = f"{instance}: {text.partition(': ')[2]}"

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        while not self._stopping.is_set() and (late := [each for each in self._processes if not each.ready.is_set()]):
            await wait_any((late[0].ready, late[0].done, self._stopping))
        if not self._stopping.is_set():
            on_ready()

    async def _watch_logs(self) -> None:
        """Show the processes' warnings with their names, and keep each log below its limit."""
        followers: dict[str, LogFollower] = {}
        activity = Activity()
        while True:
            await activity.pause(REFRESH_INTERVAL_S, activity.quiet_s())
            names = [process.plan.instance for process in self._processes]
            followers = {name: followers.get(name) or LogFollower(self._files.log_file(name)) for name in names}
            for instance, follower in followers.items():
                for line in follower.new_lines():
                    activity.work.set()
                    if not self._stopping.is_set():  # processes that lose each other while ending are no news
                        self._console.echo_log(instance, line)
                self._files.limit_log(instance)
            for own in (LAUNCHER_LOG, TEMPLATE_LOG):  # the console's lines where it is detached; the forks' imports
                self._files.limit_log(own)

    async def _watch_stopped(self) -> None:
        """Let processes of this machine go on that a signal (SIGSTOP, SIGTSTP) has stopped: the kernel says when."""
        since_s: dict[ProcessMark, float] = {}
        changed = asyncio.Event()
        asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, changed.set)
        while True:
            if not since_s:
                await changed.wait()
                changed.clear()
            await asyncio.sleep(REFRESH_INTERVAL_S)
            now_s = time.monotonic()
            stopped = {mark: name for name, mark in self.marks.items() if is_stopped(mark.pid)}
            since_s = {mark: since_s.get(mark, now_s) for mark in stopped}
            for mark, name in stopped.items():
                if now_s - since_s[mark] >= STOPPED_S and mark.send(signal.SIGCONT):
                    self._console.print_line(f"{name} was stopped by a signal; it goes on", style="yellow")

    # -- ending ---------------------------------------------------------------------------------------------------

    async def _stop_all(self) -> None:
        self._console.freeze()
        if not self.failure:
            self._console.print_line("draining: running requests finish; Ctrl-C again ends at once")
        for stage in StopStage:
            group = [process for process in self._processes if process.plan.stage is stage]
            await self._stop([process for process in group if not process.done.is_set()])
        if self.failure:
            self._console.print_line(f"given up: {self._cause}", style="red")

    async def _stop(self, group: Sequence[Supervised]) -> None:
        for process in group:
            if not process.leaving.is_set():  # a second SIGTERM would end it at once
                process.leaving.set()
                self._terminate(process)
        if group:
            drain_s = max(process.plan.stop_timeout_s for process in group)
            await _until_done(group, FAILED_STOP_TIMEOUT_S if self.failure else drain_s, self._kill_now)
        late = [process for process in group if not process.done.is_set()]
        for process in late:
            self._kill(process)
        await _until_done(late, KILL_TIMEOUT_S)

    def _terminate(self, process: Supervised) -> None:
        if process.child is not None and process.child.running:
            self._console.update(process.plan.instance, State.STOPPING)
            process.child.terminate()

    def _kill(self, process: Supervised) -> None:
        if process.child is not None and process.child.running:
            if not self._kill_now.is_set():
                self._console.print_line(f"{process.plan.instance} did not end in time; killed", style="red")
            process.killed = True
            process.child.kill()


async def wait_any(events: Sequence[asyncio.Event], timeout_s: float | None = None) -> None:
    """Wait for one of the events or the deadline."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)


async def _until_done(group: Sequence[Supervised], timeout_s: float, *abort: asyncio.Event) -> None:
    """Wait until all have ended, for an event to abort, or for the deadline."""
    deadline_s = time.monotonic() + timeout_s
    for process in group:
        await wait_any((process.done, *abort), max(0.0, deadline_s - time.monotonic()))
