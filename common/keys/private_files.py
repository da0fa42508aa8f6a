"""Folders and files for their owner alone: state learned from users' requests, logs, sockets, configurations.

Two layers. A process that serves creates nothing that others may read (`keep_private`, its umask); and files with
users' words and folders of sockets set their own mode, which also mends existing ones. Folders outside the cache are
the operator's: they are created closed, and left as they are when they exist.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import BinaryIO, Literal

from cohort.common import paths
from cohort.common.errors import ConfigError

OTHERS = stat.S_IRWXG | stat.S_IRWXO


def keep_private() -> None:
    """Make the cache, and all files that this process and its children create from now on, their owner's alone."""
    os.umask(OTHERS)
    with contextlib.suppress(OSError):  # a folder that cannot be made or changed fails where it is needed, by name
        private_folder(paths.cache_dir())


def private_folder(folder: Path) -> None:
    """Make it, with mode 0700. One that exists is closed to others if it is the cache's, which has no other readers,
    or left alone: a folder named by an option or by COHORT_CACHE_DIR may be shared on purpose. Raises `OSError`."""
    cache = paths.cache_dir()
    ours = folder.is_relative_to(cache) and (folder != cache or "COHORT_CACHE_DIR" not in os.environ)
    if ours and folder != cache:
        private_folder(folder.parent)
    try:
        folder.mkdir(mode=0o700, parents=True)
        return
    except FileExistsError:
        if not folder.is_dir():
            raise
    if ours and (mode := stat.S_IMODE(folder.stat().st_mode)) & OTHERS:
        folder.chmod(mode & ~OTHERS)


def open_private(path: Path, mode: Literal["ab", "wb"]) -> BinaryIO:
    """Open a file for writing that only its owner can read, also if it was there with another mode."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | (os.O_APPEND if mode == "ab" else os.O_TRUNC)
    descriptor = os.open(path, flags, 0o600)
    with contextlib.suppress(OSError):  # another owner's file that we may write all the same
        os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, mode)


def write_private(path: Path, data: bytes) -> None:
    """Write as a whole: a reader of `path` sees the old file or the new one. The part is made under a name that nobody
    can guess, and must be new: in a shared folder nobody else's file is written. Raises `OSError`."""
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(part, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def require_private(folder: Path, option: str) -> None:
    """Raise `ConfigError` if a user other than its owner, or another owner, can enter a folder that exists: the
    sockets in it have no other protection."""
    status = folder.stat()
    if status.st_uid not in (os.geteuid(), 0):
        raise ConfigError(f"{option}: {folder} belongs to another user; name one of your own")
    if status.st_mode & OTHERS:
        raise ConfigError(
            f"{option}: others can enter {folder} (mode {stat.S_IMODE(status.st_mode):04o}), and the sockets in it "
            f"have no other protection; `chmod 700 {folder}`, or name a folder that does not exist yet"
        )
