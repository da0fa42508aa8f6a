"""Contents of files on disk: uploads as they arrive, outputs of batches, and leftovers of a killed process.

    <folder>/            0700
      lock               held (flock): by one gateway, or together by all that share a port
      runner             held by the one of these that runs the batches
      batches.sqlite     what `batch_store.py` remembers
      limits/            what keys have in use, of several gateways (`key_table.py`)
      files/<id>         one file's content; <id>.part, held (flock), while it is being written
      files.lost/<id>    contents that were here when the database was new: nothing here reads or deletes them

A content gets its id when it is complete and on disk; its row follows. A file without a row belongs to no upload and is
removed at start, if its name is ours and no other gateway has the folder. A `.part` that no process holds is removed at
any gateway's start and every minute. Other files stay. Locks are the kernel's, gone with their process. Everything here
may block: callers use threads.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

from cohort.common import paths
from cohort.common.addresses import GATEWAY
from cohort.common.config import Config
from cohort.common.errors import ConfigError

PART = ".part"
CLEAN_UP_S = 60.0
"""Longest time that a start waits for the start of another gateway."""
PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600
_OURS = re.compile(r"file-[0-9a-f]{24}(-output|-error)?(?P<part>\.part)?")
"""Names that this module gives: ids as `batch_api.py` and `batch_runner.py` make them."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """Unknown files that a start found in the folder, counted by what became of them."""

    removed: int = 0
    lost: int = 0
    """Number of contents moved to `files.lost`."""
    retained: int = 0
    """Contents that no row names and that were left alone."""
    foreign: int = 0
    """Number of files that this program did not make; they are left alone."""


def folder_of(config: Config, instance: str) -> Path:
    """Return the folder of a port's gateways: pipelines must not share one, nor nodes, even on a shared disk."""
    own = "" if config.gateway.processes > 1 or instance == GATEWAY else f"-{instance}"
    return paths.state_dir(config.state.folder) / "batches" / f"{config.gateway.port}{own}"


class BatchFolder:
    """The folder of the batches of one port's gateways, locked from `open` to `close`."""

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        """`shared`: among several gateways of this pipeline."""
        self.shared = shared
        self.is_exclusive = False
        """Whether no other gateway has the folder: unless it is shared, and from `open` until `admit_others`."""
        self.path = path
        self.database = self.path / "batches.sqlite"
        self._files = self.path / "files"
        self.lost = self.path / "files.lost"
        self._lock: BinaryIO | None = None
        self._runner: BinaryIO | None = None

    def open(self) -> None:
        """Open the folder, after any other gateway's clean-up. Raises `ConfigError` if unusable or taken."""
        try:
            self.path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
            self._make_private(self.path)
            self._files.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
            self._make_private(self._files)
            lock = _written_privately(self.path / "lock")
            runner = _written_privately(self.path / "runner")
        except OSError as error:
            raise ConfigError(f"state.folder: {self.path} cannot be used: {error.strerror}") from error
        self._lock, self._runner = lock, runner
        self.is_exclusive = _locked(lock, fcntl.LOCK_EX)
        if self.is_exclusive:
            return
        deadline_s = time.monotonic() + CLEAN_UP_S
        while not (self.shared and _locked(lock, fcntl.LOCK_SH)):
            if not self.shared or time.monotonic() > deadline_s:
                self.close()
                raise ConfigError(
                    f"state.folder: another gateway uses {self.path}; give each pipeline a port or a folder of its own"
                )
            time.sleep(0.05)

    def admit_others(self) -> None:
        """Let other gateways of the port use the folder too, from now on."""
        if self.shared and self.is_exclusive and self._lock is not None:
            self.is_exclusive = False
            fcntl.flock(self._lock, fcntl.LOCK_SH)

    def may_run(self) -> bool:
        """Return whether this gateway runs the folder's batches. Once it does, it does until `close`."""
        return self._runner is not None and _locked(self._runner, fcntl.LOCK_EX)

    def close(self) -> None:
        for lock in (self._runner, self._lock):
            if lock is not None:
                lock.close()
        self._lock = self._runner = None

    def content(self, file_id: str) -> Path:
        return self._files / file_id

    def remove(self, file_ids: Iterable[str]) -> None:
        for file_id in file_ids:
            self.content(file_id).unlink(missing_ok=True)

    def clean_up(self, known: set[str], *, held_files: bool, sound: bool) -> Leftovers:
        """Remove what a killed process left: half-written contents, and whole ones that no row names. `held_files`: the
        database has known a file before; if not, it is another one than these contents', which go to `files.lost`.
        `sound`: all of the database was checked; else whole contents stay."""
        removed = lost = retained = foreign = 0
        for entry in list(os.scandir(self._files)):
            ours = _OURS.fullmatch(entry.name)
            if ours is None or not entry.is_file(follow_symlinks=False):
                foreign += 1
            elif ours["part"]:
                removed += _removed_if_abandoned(Path(entry.path))
            elif entry.name in known:
                if entry.stat(follow_symlinks=False).st_mode & 0o077:
                    os.chmod(entry.path, PRIVATE_FILE)
            elif not held_files:
                self._set_aside(entry.name)
                lost += 1
            elif sound:
                os.unlink(entry.path)
                removed += 1
            else:
                retained += 1
        return Leftovers(removed, lost, retained, foreign)

    def remove_abandoned_parts(self) -> int:
        """Remove the parts of gateways that were killed, while others go on; return how many."""
        removed = 0
        for entry in list(os.scandir(self._files)):
            ours = _OURS.fullmatch(entry.name)
            if ours is not None and ours["part"] and entry.is_file(follow_symlinks=False):
                removed += _removed_if_abandoned(Path(entry.path))
        return removed

    def _set_aside(self, name: str) -> None:
        self.lost.mkdir(mode=PRIVATE_FOLDER, exist_ok=True)
        self._make_private(self.lost)
        target, number = self.lost / name, 0
        while target.exists():  # of an earlier database that was lost
            number += 1
            target = self.lost / f"{name}.{number}"
        os.rename(self._files / name, target)
        target.chmod(PRIVATE_FILE)

    def _make_private(self, folder: Path) -> None:
        """Make a folder private, an existing one too: contents are users' prompts and answers."""
        mode = folder.stat().st_mode
        if mode & stat.S_ISVTX:
            raise ConfigError(f"state.folder: {folder} is shared with other users (sticky); name a folder of its own")
        if stat.S_IMODE(mode) != PRIVATE_FOLDER:
            folder.chmod(PRIVATE_FOLDER)

    def read(self, file_id: str) -> tuple[BinaryIO, int]:
        """Open a content; return it with its size. Raises `FileNotFoundError`."""
        file = self.content(file_id).open("rb")
        return file, os.fstat(file.fileno()).st_size

    def write(self, file_id: str) -> ContentWriter:
        return ContentWriter(self.content(file_id))


class ContentWriter:
    """Writer of one content, locked. `commit` makes it the file's content; without that it is discarded at the end."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._part = target.with_name(target.name + PART)
        self._file = _held_part(self._part)
        self._committed = False
        self.bytes = 0

    def __enter__(self) -> ContentWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.discard()

    def write(self, data: bytes) -> None:
        self._file.write(data)
        self.bytes += len(data)

    def commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._part.replace(self._target)  # while it is held: no other gateway takes it for abandoned
        self._committed = True
        self._file.close()

    def discard(self) -> None:
        """Remove the part. Harmless after `commit`."""
        if not self._committed:
            self._part.unlink(missing_ok=True)
        self._file.close()


def _held_part(path: Path) -> BinaryIO:
    """Open an empty part and lock it; again, if another gateway removed it in between."""
    while True:
        file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT, PRIVATE_FILE), "wb")
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            if _is_at(path, file):
                file.truncate(0)
                return file
        except BaseException:
            file.close()
            raise
        file.close()


def _removed_if_abandoned(path: Path) -> bool:
    """Remove a part that no process holds; return whether it did."""
    try:
        with path.open("rb") as file:
            abandoned = _locked(file, fcntl.LOCK_EX) and _is_at(path, file)
            if abandoned:
                path.unlink()
            return abandoned
    except FileNotFoundError:  # kept, discarded, or removed by another gateway
        return False


def _is_at(path: Path, file: BinaryIO) -> bool:
    """Return whether the path still names this open file. While this process locks the file, it does."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _locked(file: BinaryIO, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _written_privately(path: Path) -> BinaryIO:
    """Open a file for writing that only its owner may read, even if it exists with other rights."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE_FILE)
    os.fchmod(descriptor, PRIVATE_FILE)
    return os.fdopen(descriptor, "wb")
