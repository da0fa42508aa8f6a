"""The other side of a running pipeline: wait for a detached one, stop it, show it, restart its processes.

Finds the pipeline by its run folder; signals only processes whose start time matches the one on record.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from cohort.common.keys.private_files import open_private
from cohort.services.launcher.console import Console, Line, State
from cohort.services.launcher.processes.probe import answers_ok
from cohort.services.launcher.run_files import LAUNCHER_LOG, LauncherState, RunFiles

READY = "ready"
"""The line by which a detached launcher says that the pipeline is ready."""

EXIT_NOT_RUNNING = 3
PROBE_TIMEOUT_S = 1.0
KILLED_TIMEOUT_S = 10.0
_RESTART_POLL_S = 0.1
TAIL_LINES = 15


def detach(arguments: Sequence[str], files: RunFiles, ready_timeout_s: float) -> int:
    """Start the launcher again in the background and wait until it says that the pipeline is ready.

    It reports through a pipe: every line is shown, a last line "ready" ends the wait; end of file means it failed.
    """
    files.make()
    files.start_log(LAUNCHER_LOG)
    ours, theirs = os.pipe()
    with open_private(files.log_file(LAUNCHER_LOG), "ab") as log:
        command = [sys.executable, "-P", "-m", "cohort.services.launcher", *arguments, "--notify-fd", str(theirs)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=(theirs,),
        )
    os.close(theirs)
    outcome = _follow(ours, time.monotonic() + ready_timeout_s)
    if outcome == "ready":
        return 0
    if outcome == "timeout":
        sys.stderr.write(f"not ready after {ready_timeout_s:.0f} s; ending it\n")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=KILLED_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
    sys.stderr.write(f"the end of {files.log_file(LAUNCHER_LOG)}:\n")
    for line in files.log_tail(LAUNCHER_LOG, TAIL_LINES):
        sys.stderr.write(f"  {line}\n")
    return process.returncode or 1


def _follow(descriptor: int, deadline_s: float) -> str:
    """Show what arrives until "ready", the end ("ended") or the deadline ("timeout")."""
    partial = b""
    arrived = select.poll()  # takes descriptors of any number, as `select.select` does not
    arrived.register(descriptor, select.POLLIN)
    with os.fdopen(descriptor, "rb", buffering=0) as pipe:
        while True:
            if not arrived.poll(max(0.0, deadline_s - time.monotonic()) * 1000):
                return "timeout"
            data = pipe.read(65_536)
            if not data:
                return "ended"
            *lines, partial = (partial + data).split(b"\n")
            for line in lines:
                if line == READY.encode():
                    return "ready"
                sys.stdout.write(line.decode(errors="replace") + "\n")
                sys.stdout.flush()


def running(files: RunFiles, port: int, number: signal.Signals | None = None) -> LauncherState | None:
    """Return the pipeline of this folder after signalling its launcher; None, with a message, if none runs."""
    state = files.state()
    if state is not None and files.claimed and (number is None or state.launcher.send(number)):
        return state
    sys.stderr.write(f"no pipeline is running on port {port}\n")
    return None


def stop(files: RunFiles, port: int) -> int:
    """Drain the pipeline, then end it; kill it when it does not end in its own time."""
    if (state := running(files, port, signal.SIGTERM)) is None:
        return EXIT_NOT_RUNNING
    longest = f"up to {state.stop_timeout_s:.0f} s if requests are running"
    sys.stdout.write(f"stopping {state.name} on port {port} ({longest})\n")
    sys.stdout.flush()
    if state.launcher.wait_ended(state.stop_timeout_s):
        sys.stdout.write("stopped\n")
        return 0
    sys.stderr.write("it did not end in time; killing it\n")
    state.launcher.send(signal.SIGKILL)
    for mark in (state.launcher, *state.processes.values()):  # the processes die with their launcher
        mark.wait_ended(KILLED_TIMEOUT_S)
    return 1


def status(files: RunFiles, port: int) -> int:
    """Print a line per process. Exit code 0: all ready; 1: some are not; 3: nothing runs."""
    if (state := running(files, port)) is None:
        return EXIT_NOT_RUNNING
    ready = asyncio.run(_probe(state))
    lines = []
    for instance, url in state.ready_urls.items():
        mark = state.processes.get(instance)
        node = state.nodes.get(instance, "")
        alive = bool(node) if state.nodes else mark is not None and mark.alive
        now = State.READY if alive and ready[instance] else State.STARTING if alive else State.RESTARTING
        number = int(url.rpartition(":")[2].partition("/")[0])
        lines.append(Line(instance, number, files.log_file(instance), now, mark.pid if mark else 0, node=node))
    console = Console(lines)
    console.print_line(f"{state.name} on {state.url}, launcher pid {state.launcher.pid}")
    console.show()
    return 0 if all(line.state is State.READY for line in lines) else 1


def restart(files: RunFiles, port: int, instances: Sequence[str]) -> int:
    """Restart the named processes, or all, one after the other. Exit code 0: all are ready again; 1: one did not come
    back, or there is no such process; 3: nothing runs."""
    if (state := running(files, port)) is None:
        return EXIT_NOT_RUNNING
    if why := _no_restart(state, instances):
        sys.stderr.write(f"{why}\n")
        return 1
    files.request_restart(list(instances))
    if running(files, port, signal.SIGUSR1) is None:
        return EXIT_NOT_RUNNING
    return _follow_restart(files, state)


def _no_restart(state: LauncherState, instances: Sequence[str]) -> str:
    """Return why there can be no restart; "" if there can."""
    if state.nodes:
        return "a pipeline on Ray is not restarted process by process"
    if state.restart.running:
        return f"a restart is under way; it waits for {state.restart.left[0]}"
    unknown = [name for name in instances if name not in state.ready_urls]
    return f"no process {unknown[0]} here; there are {', '.join(state.ready_urls)}" if unknown else ""


def _follow_restart(files: RunFiles, before: LauncherState) -> int:
    """Print each process when it is ready again."""
    printed, began_s = 0, time.monotonic()
    while before.launcher.alive:
        time.sleep(_RESTART_POLL_S)
        state = files.state()
        if state is None or state.restart.number == before.restart.number:
            continue
        now = state.restart
        for name in now.done[printed:]:
            sys.stdout.write(f"{name} is ready again after {time.monotonic() - began_s:.1f} s\n")
            sys.stdout.flush()
            began_s = time.monotonic()
        printed = len(now.done)
        if now.failure:
            sys.stderr.write(f"stopped: {now.failure}; as before: {', '.join(now.left[1:]) or 'none'}\n")
            return 1
        if not now.left:
            return 0
    sys.stderr.write("the pipeline has ended meanwhile\n")
    return 1


async def _probe(state: LauncherState) -> dict[str, bool]:
    async def ready(url: str) -> bool:
        """Probe twice: a busy process may miss one probe."""
        return await answers_ok(url, PROBE_TIMEOUT_S) or await answers_ok(url, PROBE_TIMEOUT_S)

    answers = await asyncio.gather(*(ready(url) for url in state.ready_urls.values()))
    return dict(zip(state.ready_urls, answers, strict=True))
