"""Learned step times of a worker's scheduler, on disk over a restart.

Loaded once before serving, saved now and then and at the end; the scheduler itself stays pure (`Learned`). One file per
instance, model, device, precision, thread count and kind of scheduler: its values hold for nothing else. An instance
without one, as each new container is, starts from the newest of those that differ by the instance alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
from pathlib import Path

import structlog

from cohort.common.errors import ConfigError
from cohort.common.keys.private_files import open_private, private_folder
from cohort.common.policies.interface import Learned

SAVE_EVERY_S = 30.0

log = structlog.get_logger(__name__)


class LearnedState:
    """File of a scheduler's learned times. `profile`: file of `cohort profile` to start from instead; "" = none.
    `alike`: pattern of the names of files that would do as well, `*` for what may differ."""

    def __init__(self, learned: Learned, folder: Path, name: str, profile: str, alike: str = "") -> None:
        self._learned = learned
        self._path = folder / f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.json"
        self._alike = f"{re.sub(r'[^A-Za-z0-9._*-]+', '-', alike)}.json"
        self._profile = profile
        self._saved_s = 0.0
        self._failures: set[str] = set()
        """Kinds of failures that were logged: logging each one would fill the log."""
        self.imported = b""
        """State that the scheduler started from; empty if it had none."""

    def load(self) -> str:
        """Load, and return the source: "kept", "profile" or "nothing". A stored file that cannot be read is ignored: it
        is rewritten anyway. Raises `ConfigError` for a requested profile that is none."""
        for path in (self._path, *self._newest_first()):
            with contextlib.suppress(OSError, ValueError):
                self._import(path)
                return "kept"
        if not self._profile:
            return "nothing"
        try:
            self._import(Path(self._profile))
        except (OSError, ValueError) as error:
            raise ConfigError(f"profile: {self._profile}: {error}") from error
        return "profile"

    def _newest_first(self) -> list[Path]:
        try:
            return sorted(self._path.parent.glob(self._alike), key=lambda path: path.stat().st_mtime, reverse=True)
        except OSError:  # one that was renamed meanwhile
            return []

    def _import(self, path: Path) -> None:
        data = path.read_bytes()
        self._learned.import_state(data)
        self.imported = data

    def forget(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()

    def save_if_due(self, now_s: float) -> None:
        if now_s - self._saved_s >= SAVE_EVERY_S:
            self._saved_s = now_s
            self.save()

    def save(self) -> None:
        """Write the state whole or not at all. A failure is logged once per kind: a full disk must not end a worker."""
        state = self._learned.export_state()
        if not state:
            return
        fresh = self._path.with_suffix(f".{os.getpid()}")
        try:
            private_folder(self._path.parent)
            with open_private(fresh, "wb") as file:
                file.write(state)
            fresh.replace(self._path)
        except OSError as error:
            with contextlib.suppress(OSError):
                fresh.unlink()
            kind = errno.errorcode.get(error.errno or 0, type(error).__name__)
            if kind not in self._failures:
                self._failures.add(kind)
                log.warning("learned state not saved", path=str(self._path), kind=kind, error=str(error))
