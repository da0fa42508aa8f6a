"""What keys have in use at all gateways of a port: a file of small records, one per key and class, and its lock.

    <folder of batches>/limits/table     records; its lock (flock) is held for one look or change, some microseconds
    <folder of batches>/limits/slot-N    held (flock) by the gateway that counts in column N, as long as it lives

A record has the key's buckets and day, and for each gateway its open requests and reserved tokens. The kernel frees a
killed process's locks, so its column is known to be dead; it is given back before a refusal, or when another gateway
takes the slot. The table is empty at the first gateway's start. Used by `key_shared.py`, on the event loop, under the
lock. A record lies within one page, so a process that is killed leaves the old one or the new one.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from cohort.common.errors import ConfigError

SLOTS = 60
"""Gateways at a time."""
_HEAD = struct.Struct("<16s3d2q8x")
_CELLS = struct.Struct(f"<{2 * SLOTS}q")
_RECORD_BYTES = _HEAD.size + _CELLS.size
assert 4096 % _RECORD_BYTES == 0


@dataclass(slots=True)
class Record:
    """State of one key and class. `at_s`: monotonic time of the last refill; `day`: number of the day of UTC; `open`,
    `reserved`: requests and tokens by slot."""

    digest: bytes
    requests_used: float = 0.0
    tokens_used: float = 0.0
    at_s: float = 0.0
    day: int = 0
    day_used: int = 0
    open: list[int] = field(default_factory=lambda: [0] * SLOTS)
    reserved: list[int] = field(default_factory=lambda: [0] * SLOTS)

    @classmethod
    def decode(cls, data: bytes) -> Record:
        digest, requests_used, tokens_used, at_s, day, day_used = _HEAD.unpack_from(data)
        cells = _CELLS.unpack_from(data, _HEAD.size)
        return cls(digest, requests_used, tokens_used, at_s, day, day_used, list(cells[:SLOTS]), list(cells[SLOTS:]))

    def encode(self) -> bytes:
        head = _HEAD.pack(self.digest, self.requests_used, self.tokens_used, self.at_s, self.day, self.day_used)
        return head + _CELLS.pack(*self.open, *self.reserved)

    def forget(self, slot: int) -> bool:
        """Give back what a slot had, but for the minute's buckets, which refill; return whether there was anything."""
        had = bool(self.open[slot] or self.reserved[slot])
        self.day_used = max(0, self.day_used - self.reserved[slot])
        self.open[slot] = self.reserved[slot] = 0
        return had


class KeyTable:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = -1
        self._slot_files: dict[int, int] = {}
        """Descriptors; the own one is locked."""
        self._places: dict[bytes, int] = {}
        self._known = 0
        self.slot = -1

    def open(self) -> None:
        """Open the table and take a slot. Raises `ConfigError`."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = _private(self._folder / "table")
            with self.locked():
                self._take_slot()
        except OSError as error:
            self.close()
            raise ConfigError(f"state.folder: {self._folder} cannot be used: {error.strerror}") from error
        except ConfigError:
            self.close()
            raise

    def close(self) -> None:
        """Close the table. What is still open here is given back, as when a process ends."""
        for file in (*self._slot_files.values(), self._file):
            if file >= 0:
                os.close(file)
        self._slot_files.clear()
        self._file = self.slot = -1

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock out all other gateways within the block. Not to be nested."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def place(self, first: Record) -> int:
        """Return the place of the record with this digest; `first` is added where there is none."""
        count = os.fstat(self._file).st_size // _RECORD_BYTES  # part of a record: its writer was killed
        while self._known < count:
            self._places[self.read(self._known).digest] = self._known
            self._known += 1
        if first.digest not in self._places:
            self.write(count, first)
            self._places[first.digest] = count
            self._known = count + 1
        return self._places[first.digest]

    def read(self, place: int) -> Record:
        return Record.decode(os.pread(self._file, _RECORD_BYTES, place * _RECORD_BYTES))

    def write(self, place: int, record: Record) -> None:
        os.pwrite(self._file, record.encode(), place * _RECORD_BYTES)

    def release_stale(self, record: Record) -> bool:
        """Give back what dead gateways have in the record; return whether there was anything."""
        slots = [slot for slot in range(SLOTS) if record.open[slot] or record.reserved[slot]]
        # Of every one, not up to the first.
        return any([record.forget(slot) for slot in slots if slot != self.slot and not self._alive(slot)])

    def _take_slot(self) -> None:
        self.slot = next((slot for slot in range(SLOTS) if self._locks(slot)), -1)
        if self.slot < 0:
            raise ConfigError(f"gateway.processes: limits of keys can be shared by {SLOTS} gateways")
        if not any(self._alive(slot) for slot in range(SLOTS) if slot != self.slot and self._path(slot).exists()):
            os.ftruncate(self._file, 0)
            return
        for place in range(os.fstat(self._file).st_size // _RECORD_BYTES):
            record = self.read(place)
            if record.forget(self.slot):  # of the gateway that had the slot before
                self.write(place, record)

    def _path(self, slot: int) -> Path:
        return self._folder / f"slot-{slot}"

    def _locks(self, slot: int) -> bool:
        if slot not in self._slot_files:
            self._slot_files[slot] = _private(self._path(slot))
        with suppress(BlockingIOError):
            fcntl.flock(self._slot_files[slot], fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        return False

    def _alive(self, slot: int) -> bool:
        """Return whether a gateway holds the slot. Under the table's lock a test is never taken for a holder."""
        if not self._locks(slot):
            return True
        fcntl.flock(self._slot_files[slot], fcntl.LOCK_UN)
        return False


def _private(path: Path) -> int:
    """Open a file that child processes do not inherit: the lock would outlive this process."""
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
