"""The run folder of one pipeline: its owner, its state file, its logs, and the leftovers of a crashed run.

run/<port>/             0700
  launcher.lock         held (flock) as long as a launcher lives: the one truth about "is it running"
  launcher.json         its pid and the processes', each with its start time, so that no stranger is ever signalled
  resolved.yaml         the configuration all processes read
  restart.json          which processes are to be restarted, until the launcher has read it
  *.sock                inboxes of the processes
  logs/<instance>.log   output of each process; .1 is what came before, of this run or the last. In a container all
                        goes to standard output, whose keeper limits it
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from cohort.common.errors import CohortError
from cohort.common.keys.private_files import private_folder

STANDARD_OUTPUT = Path("/dev/stdout")
LAUNCHER_LOG, TEMPLATE_LOG = "launcher", "templates"
LOG_BYTES = 256 << 10
"""The most that is read of a log at once."""
LOG_LIMIT_BYTES = 16 << 20
"""A log that grew beyond this moves to .1 while its process keeps writing: a process's logs take twice that, and a
looping traceback on all ten of the default cannot fill a disk. It is hours of a warning a second."""


class RunFilesError(CohortError):
    """The run folder is in use or cannot be used."""


class ProcessMark(msgspec.Struct, frozen=True):
    """Unmistakable process: its pid, and when it started in clock ticks since boot."""

    pid: int
    start_ticks: int

    @staticmethod
    def of(pid: int) -> ProcessMark | None:
        ticks = _start_ticks(pid)
        return None if ticks is None else ProcessMark(pid, ticks)

    @property
    def alive(self) -> bool:
        return _start_ticks(self.pid) == self.start_ticks

    def send(self, number: signal.Signals) -> bool:
        """Signal exactly this process; False if it is gone. The pidfd pins it before its start time is compared."""
        try:
            fd = os.pidfd_open(self.pid)
        except (ProcessLookupError, PermissionError):
            return False
        try:
            if not self.alive:
                return False
            signal.pidfd_send_signal(fd, number)
        except (ProcessLookupError, PermissionError):
            return False
        finally:
            os.close(fd)
        return True

    def wait_ended(self, timeout_s: float) -> bool:
        """Wait for its end; return whether it ended. Also works for processes that are not our children."""
        try:
            fd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return True
        try:
            if not self.alive:
                return True
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            return bool(poll.poll(max(0.0, timeout_s) * 1000))
        finally:
            os.close(fd)


class RestartState(msgspec.Struct, frozen=True):
    """Progress of the rolling restart, or of the last one. `failure`: why it stopped, "" if it did not."""

    number: int
    done: list[str]
    left: list[str]
    failure: str = ""

    @property
    def running(self) -> bool:
        return bool(self.left) and not self.failure


class LauncherState(msgspec.Struct, frozen=True):
    """Content of launcher.json, for `--stop`, `--status` and `cohort restart`."""

    launcher: ProcessMark
    name: str
    url: str
    stop_timeout_s: float
    processes: dict[str, ProcessMark]
    ready_urls: dict[str, str]
    nodes: dict[str, str] = {}
    """Node of each process, in a pipeline on several machines. Those have no mark: a mark is of this machine."""
    restart: RestartState = RestartState(0, [], [])


class RunFiles:
    def __init__(self, folder: Path, *, logs_to_stdout: bool = False) -> None:
        self.folder = folder
        self.logs_to_stdout = logs_to_stdout
        self.config_file = folder / "resolved.yaml"
        self.logs = folder / "logs"
        self._state_file = folder / "launcher.json"
        self._lock_file = folder / "launcher.lock"
        self._wanted_file = folder / "restart.json"

    def log_file(self, instance: str) -> Path:
        return STANDARD_OUTPUT if self.logs_to_stdout else self.logs / f"{instance}.log"

    def make(self) -> None:
        """Make the folders for their owner alone: sockets have no other protection, and logs may show what users do."""
        private_folder(self.folder)
        self.folder.chmod(0o700)
        private_folder(self.logs)

    @contextlib.contextmanager
    def claim(self) -> Iterator[None]:
        """Own the folder as long as the context lasts. Raises `RunFilesError` if a launcher runs here."""
        self.make()
        with self._lock_file.open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                state = self.state()
                who = f" (process {state.launcher.pid}, {state.url})" if state else ""
                raise RunFilesError(
                    f"a pipeline is already running here{who}; end it with --stop, or choose another --port"
                ) from None
            self._clear_leftovers()
            try:
                yield
            finally:
                self._remove_sockets()
                self._state_file.unlink(missing_ok=True)

    @property
    def claimed(self) -> bool:
        """A launcher runs here."""
        try:
            with self._lock_file.open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except BlockingIOError:
            return True
        return False

    def state(self) -> LauncherState | None:
        try:
            return msgspec.json.decode(self._state_file.read_bytes(), type=LauncherState)
        except (FileNotFoundError, msgspec.MsgspecError):
            return None

    def write_state(self, state: LauncherState) -> None:
        self._write(self._state_file, msgspec.json.encode(state))

    def request_restart(self, instances: list[str]) -> None:
        """Write which processes the next rolling restart is for, before the launcher is signalled."""
        self._write(self._wanted_file, msgspec.json.encode(instances))

    def wanted_restart(self) -> list[str]:
        """Take the processes to restart, which removes their file; empty if none were written."""
        try:
            found = msgspec.json.decode(self._wanted_file.read_bytes(), type=list[str])
        except (FileNotFoundError, msgspec.MsgspecError):
            return []
        self._wanted_file.unlink(missing_ok=True)
        return found

    def write_config(self, text: str) -> None:
        """Write the configuration for its owner alone: it may hold API keys."""
        self._write(self.config_file, text.encode())

    def start_log(self, instance: str) -> None:
        """Begin an empty log and keep the last one as .1."""
        path = self.log_file(instance)
        if path.exists() and not self.logs_to_stdout:
            path.replace(path.with_suffix(".log.1"))

    def limit_log(self, instance: str) -> None:
        """Move the content of a large log. Its process appends to the open file, so it is copied and cut; what a full
        disk does not take of the copy is lost."""
        path = self.log_file(instance)
        with contextlib.suppress(OSError):
            if path.stat().st_size > LOG_LIMIT_BYTES:
                with contextlib.suppress(OSError):
                    shutil.copyfile(path, path.with_suffix(".log.1"))
                os.truncate(path, 0)

    def log_tail(self, instance: str, lines: int) -> list[str]:
        """Return the last lines of a log, empty ones left out."""
        if self.logs_to_stdout:
            return []  # they have been shown
        try:
            with self.log_file(instance).open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 65_536))
                text = file.read().decode("utf-8", "replace")
        except FileNotFoundError:
            return []
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def _clear_leftovers(self) -> None:
        """Remove what a killed launcher left: its state, and a process that did not die with it."""
        state = self.state()
        if state is not None:
            deadline_s = time.monotonic() + 3.0
            for mark in state.processes.values():
                if not mark.wait_ended(deadline_s - time.monotonic()):
                    mark.send(signal.SIGKILL)
                    mark.wait_ended(3.0)
            self._state_file.unlink(missing_ok=True)
        self._remove_sockets()

    def _remove_sockets(self) -> None:
        for path in self.folder.glob("*.sock"):
            path.unlink(missing_ok=True)

    @staticmethod
    def _write(path: Path, data: bytes) -> None:
        partial = path.with_name(f".{path.name}.partial")
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        partial.replace(path)


def read_log(path: Path, offset: int) -> tuple[bytes, int, int]:
    """Return what a log has from `offset` on, where that ends, and how many bytes were left out before it: of more than
    `LOG_BYTES` only the newest are read. Begins at 0 if the log was cut or is new."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            offset = 0 if size < offset else offset
            start = file.seek(max(offset, size - LOG_BYTES))
            data = file.read(LOG_BYTES)
            return data, start + len(data), start - offset
    except FileNotFoundError:
        return b"", 0, 0


def is_stopped(pid: int) -> bool:
    """Return whether a signal has stopped the process (no debugger, whose state is another one)."""
    return _stat_fields(pid)[:1] == ["T"]


def _start_ticks(pid: int) -> int | None:
    """Return field 22 of /proc/PID/stat; None for a zombie, which has ended."""
    fields = _stat_fields(pid)
    return int(fields[19]) if fields and fields[0] not in "ZX" else None


def _stat_fields(pid: int) -> list[str]:
    """Return the fields from the third on, the state; none if there is no such process. The name in the second may
    contain anything, so they count from its closing parenthesis."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []
