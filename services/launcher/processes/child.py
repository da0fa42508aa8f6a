"""One running process, started here or by a template: so that it can neither be orphaned nor leave anything behind.

- Own session: Ctrl-C at the terminal reaches the launcher only, which then ends the processes in order.
- Parent-death signal: when the launcher dies, even by kill -9, the kernel kills the process.
- Its process group is killed when it ends, so that helpers it started end with it.
- Its end is an event (a pidfd), not something to poll for.

Called by the supervisor from the main thread only: the parent-death signal is bound to the thread that starts the
process.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cohort.common.errors import CohortError
from cohort.common.http.listeners import environment as passed
from cohort.common.keys.private_files import open_private

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
_ENDING_S = 0.1
_libc = ctypes.CDLL(None, use_errno=True)


class LauncherGone(CohortError):
    """The launcher was gone before its process began."""


class Running:
    """Process whose parent is this one, and the group that it leads."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._loop.add_reader(self._pidfd, self._reap)

    @property
    def running(self) -> bool:
        return not self._ended.done()

    async def wait(self) -> int:
        """Exit code, negative for a signal. May be awaited by several and cancelled freely."""
        return await asyncio.shield(self._ended)

    def terminate(self) -> None:
        """Ask it to drain and end."""
        self._signal(signal.SIGTERM)

    def hand_over(self) -> None:
        """Ask it to serve open connections to their end while another process takes its port over."""
        self._signal(signal.SIGUSR1)

    def kill(self) -> None:
        """End it and all it started, now."""
        if self.running:
            self._kill_group()

    def _signal(self, number: signal.Signals) -> None:
        if self.running:
            os.kill(self.pid, number)

    def _reap(self) -> None:
        """Report its end. Until it is reaped its group id cannot belong to another process: clear the group first."""
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._kill_group()
        self._ended.set_result(self._exit_code())
        self._reap_group()

    def _reap_group(self) -> None:
        """Reap those of its group that this process has adopted; they were killed and end at any moment."""
        with contextlib.suppress(ChildProcessError):  # none is left
            while os.waitpid(-self.pid, os.WNOHANG)[0]:
                pass
            self._loop.call_later(_ENDING_S, self._reap_group)

    def _exit_code(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)


class Child(Running):
    """Process that this one has started."""

    def __init__(
        self, command: Sequence[str], log_file: Path, environment: Mapping[str, str], descriptors: Sequence[int] = ()
    ) -> None:
        """`descriptors` that it inherits, under the same numbers."""
        with open_private(log_file, "ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                start_new_session=True,
                pass_fds=tuple(descriptors),
                preexec_fn=_die_with(os.getpid()),
            )
        super().__init__(self._process.pid)

    def _exit_code(self) -> int:
        return self._process.wait()


def started(
    command: Sequence[str], log_file: Path, environment: Mapping[str, str], listeners: Sequence[int] = ()
) -> Child:
    """Start a process that serves `listeners`, by descriptor."""
    return Child(command, log_file, {**environment, **passed(listeners)}, listeners)


def adopt_orphans() -> None:
    """Make this process the parent of those below it whose own parent ends."""
    _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _die_with(launcher_pid: int) -> Callable[[], None]:
    """Run in the new process before its program. libc is loaded beforehand: nothing here imports or allocates much."""

    def set_parent_death_signal() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != launcher_pid:
            raise LauncherGone

    return set_parent_death_signal
