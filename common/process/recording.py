"""Where a live process's recording goes: `recording.folder`. The line between a service and its machine.

Called by the gateway, the manager and the workers at start. With no folder named the machine itself is handed back, and
nothing costs anything. A recording that cannot be written ends, with a warning; never the process it is of.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from cohort.common.errors import ConfigError
from cohort.common.machines.machine import Effect, Event, Machine
from cohort.common.machines.recorder import Header, Recorded
from cohort.common.process.service import ServiceContext

_FLUSH_EVERY_S = 1.0
"""Interval of flushes. A machine with requests gets a tick at least as often: a killed process loses about as much."""
_BUFFER_BYTES = 1 << 20


class RecordingFile:
    """New file of each process. Readable by its owner alone: it holds what users wrote, as token ids. Raises
    `ConfigError` if it cannot be made."""

    def __init__(self, folder: Path, instance: str, log: structlog.stdlib.BoundLogger) -> None:
        self.path = folder / f"{instance}-{time.time_ns()}.jsonl"
        self._log = log
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise ConfigError(f"recording.folder: {self.path}: {error.strerror}") from error
        self._file = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)
        self._flushed_s = time.monotonic()
        self._broken = False
        atexit.register(self.close)

    def write(self, line: bytes) -> None:
        if self._broken:
            return
        try:
            self._file.write(line)
            now_s = time.monotonic()
            if now_s - self._flushed_s >= _FLUSH_EVERY_S:
                self._flushed_s = now_s
                self._file.flush()
        except (OSError, ValueError) as error:
            self._end(error)

    def close(self) -> None:
        atexit.unregister(self.close)
        try:
            self._file.close()
        except OSError as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        """Stop the recording: a missing line would make all that follow wrong."""
        self._broken = True
        self._log.warning("recording ended early", path=str(self.path), error=str(error))


def recorded(
    context: ServiceContext, machine: Machine[Event, Effect], header: Callable[[], Header]
) -> Machine[Event, Effect]:
    """Return the machine, or its recorder. Call this before the machine's first event. Only `handle` and `check` go
    through the recorder; a host reads the machine's state itself."""
    folder = context.config.recording.folder
    if not folder:
        return machine
    file = RecordingFile(Path(folder), context.instance, context.log)
    context.log.info("recording", path=str(file.path))
    return Recorded(machine, header(), file.write)
