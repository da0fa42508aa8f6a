"""Contents of files on disk: uploads as they arrive, what batches produce, and what a killed process left behind.

    <folder>/            0700, held (flock) by one gateway
      lock
      batches.sqlite     what `batch_store.py` remembers
      files/<id>         one file's content; <id>.part while it is being written

A content appears under its id only when it is complete and on disk; its row in the database follows. So a `.part`, or a
file without a row, belongs to nobody and is removed at start. Everything here may block: callers use threads.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from cohort.common import paths
from cohort.common.config import BatchConfig
from cohort.common.errors import ConfigError

PART = ".part"


class BatchFolder:
    """The folder of one gateway's batches, locked from `open` to `close`."""

    def __init__(self, config: BatchConfig, port: int) -> None:
        """`port` names the default folder: pipelines on one host must not share one."""
        self.path = Path(config.folder).expanduser() if config.folder else paths.cache_dir() / "batches" / str(port)
        self.database = self.path / "batches.sqlite"
        self._files = self.path / "files"
        self._lock: BinaryIO | None = None

    def open(self) -> None:
        """Raises `ConfigError` when it cannot be used or another process holds it."""
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._files.mkdir(mode=0o700, exist_ok=True)
            lock = (self.path / "lock").open("wb")
        except OSError as error:
            raise ConfigError(f"batch.folder: {self.path} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            lock.close()
            raise ConfigError(
                f"batch.folder: another gateway uses {self.path}; give each gateway a folder of its own"
            ) from error
        self._lock = lock

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def content(self, file_id: str) -> Path:
        return self._files / file_id

    def remove(self, file_ids: Iterable[str]) -> None:
        for file_id in file_ids:
            self.content(file_id).unlink(missing_ok=True)

    def remove_strangers(self, known: set[str]) -> int:
        """What a killed process left: everything that is no known file's content. How many there were."""
        strangers = [entry.name for entry in os.scandir(self._files) if entry.name not in known]
        self.remove(strangers)
        return len(strangers)

    def write(self, file_id: str) -> ContentWriter:
        return ContentWriter(self.content(file_id))


class ContentWriter:
    """One content being written. `keep` makes it the file's content; leaving the context without that discards it."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._part = target.with_name(target.name + PART)
        self._file = self._part.open("wb")
        self.bytes = 0

    def __enter__(self) -> ContentWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.discard()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.bytes += len(data)

    def keep(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._part.replace(self._target)

    def discard(self) -> None:
        """Harmless after `keep`."""
        self._file.close()
        self._part.unlink(missing_ok=True)
