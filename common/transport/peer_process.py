"""The process that an address belongs to, and the news of its death.

Every address of a UCX link carries its owner's `ProcessIdentity`. If that process lives on this host and in
this PID namespace, the kernel reports its death at once (a pidfd becomes readable), long before any deadline. Decides
nothing. Processes elsewhere are not watched: for those there are deadlines and the control plane.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cohort.common.errors import TransferError

_LAYOUT = struct.Struct("<4s8sQIQ8s")
_MAGIC = b"COK1"


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """The process of a link. `boot` names the running system, `start_ticks` tells a process from a later one with the
    same pid, `nonce` a link from another in the same process."""

    boot: bytes
    pid_namespace: int
    pid: int
    start_ticks: int
    nonce: bytes

    SIZE = _LAYOUT.size

    def pack(self) -> bytes:
        return _LAYOUT.pack(_MAGIC, self.boot, self.pid_namespace, self.pid, self.start_ticks, self.nonce)

    @staticmethod
    def unpack(data: bytes) -> ProcessIdentity:
        if len(data) < _LAYOUT.size:
            raise TransferError(f"not a link address of ours ({len(data)} bytes)")
        magic, *rest = _LAYOUT.unpack_from(data)
        if magic != _MAGIC:
            raise TransferError("not a link address of ours")
        return ProcessIdentity(*rest)

    @staticmethod
    def own() -> ProcessIdentity:
        return ProcessIdentity(_boot(), _pid_namespace(), os.getpid(), _start_ticks(os.getpid()) or 0, os.urandom(8))

    def is_near(self) -> bool:
        """Return whether the process is on this host and visible under its pid."""
        return self.pid_namespace != 0 and self.boot == _boot() and self.pid_namespace == _pid_namespace()


class ProcessWatch:
    """Watch over one process. `fd`: its pidfd; -1 where the kernel does not report its death, or has done so."""

    def __init__(self, identity: ProcessIdentity, loop: asyncio.AbstractEventLoop, on_exit: Callable[[], None]) -> None:
        """Call `on_exit` once when that process ends (soon, if it has)."""
        self.fd = -1
        self._loop = loop
        self._on_exit = on_exit
        if not identity.is_near() or not hasattr(os, "pidfd_open"):
            return
        try:
            self.fd = os.pidfd_open(identity.pid)
        except ProcessLookupError:
            loop.call_soon(on_exit)
            return
        except OSError:
            return
        loop.add_reader(self.fd, self._readable)
        if _start_ticks(identity.pid) != identity.start_ticks:  # the pid belongs to another process by now
            self.stop()
            loop.call_soon(on_exit)

    def _readable(self) -> None:
        self.stop()
        self._on_exit()

    def stop(self) -> None:
        if self.fd >= 0:
            self._loop.remove_reader(self.fd)
            os.close(self.fd)
            self.fd = -1


def _boot() -> bytes:
    """Return a digest of the kernel's boot id and host name, zero where there is none."""
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return bytes(8)
    return hashlib.blake2b(boot_id, digest_size=8).digest()


def _pid_namespace() -> int:
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def _start_ticks(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[19])
