"""The API keys that this gateway accepts, hashed: those of the configuration and those of the file.

Read by `middleware.py` for every request, by `tenants.py` for limits. Configured keys are hashed with a salt of this
process. The file (`keys/key_file.py`) is read again after `RELOAD_S`, when a request comes; one that cannot be read
changes nothing and is logged, so that an editor's slip locks nobody out and lets nobody in.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog

from cohort.common.clock import Clock
from cohort.common.config import Config, KeyLimits
from cohort.common.errors import ConfigError
from cohort.common.keys.key_file import SALT_BYTES, hash_key, matching, read_keys
from cohort.common.types import TrafficClass

RELOAD_S = 1.0
"""Interval between two looks at the file, for which a revoked key may still work."""
_Stamp = tuple[int, int, int]
_CONFIGURED = "config"
FILED = "key-"
"""Prefix of the ids of keys from the file."""


@dataclass(frozen=True, slots=True)
class Key:
    """One tenant. `owner` of its files, batches and shares: a filed key's id, or a configured key's digest."""

    id: str
    name: str
    owner: str
    rt: KeyLimits
    be: KeyLimits
    weight: float = 1.0
    admin: bool = False

    def limits(self, traffic_class: TrafficClass) -> KeyLimits:
        return self.rt if traffic_class == "rt" else self.be


class Keyring:
    def __init__(
        self, config: Config, configured: Sequence[str], clock: Clock, log: structlog.stdlib.BoundLogger
    ) -> None:
        """`configured`: as resolved. Raises `ConfigError` for a file that cannot be used."""
        self._limits = config.keys.limits
        self._clock = clock
        self._log = log
        self.required = bool(configured or config.keys.file)
        """Whether a request needs a key at all."""
        self._salt = secrets.token_bytes(SALT_BYTES)
        secrets_of = dict.fromkeys(configured)  # one secret is one key, however many names it has
        self._configured = [
            (hash_key(self._salt, key), self._plain(place, key)) for place, key in enumerate(secrets_of)
        ]
        self._path = Path(config.keys.file).expanduser() if config.keys.file else None
        self._file_salt = b""
        self._filed: list[tuple[bytes, Key]] = []
        self._stamp: _Stamp | None = None
        self._next_check_s = 0.0
        if self._path is not None:
            self._stamp = self._stamp_of()
            self._load(self._path)
            self._next_check_s = clock.now_s() + RELOAD_S
        self._index()

    def __len__(self) -> int:
        return len(self._configured) + len(self._filed)

    def find(self, token: str) -> Key | None:
        """Return the key with this token. All are compared, in constant time."""
        self._reload_if_changed()
        found: Key | None = None
        for salt, known in ((self._salt, self._configured), (self._file_salt, self._filed)):
            which = matching(hash_key(salt, token), [digest for digest, _ in known])
            found = found if which is None else known[which][1]
        return found

    def of_owner(self, owner: str) -> Key | None:
        """Return the owner's key; None if it was revoked or is unknown."""
        self._reload_if_changed()
        return self._of_owner.get(owner)

    def known(self) -> list[Key]:
        return list(self._of_owner.values())

    def _plain(self, place: int, key: str) -> Key:
        """Return a key named by its place: people choose such keys, and showing a digest would help to guess one."""
        name, owner = f"{_CONFIGURED}-{place}", hashlib.sha256(key.encode()).hexdigest()
        return Key(name, name, owner, self._limits, self._limits)

    def _index(self) -> None:
        self._of_owner = {key.owner: key for _, key in (*self._configured, *self._filed)}

    def _load(self, path: Path) -> None:
        file = read_keys(path)
        limits = self._limits
        self._file_salt = file.salt_bytes
        self._filed = [
            (
                bytes.fromhex(key.hash),
                Key(key.id, key.name, key.id, key.rt.over(limits), key.be.over(limits), key.weight, key.admin),
            )
            for key in file.active()
        ]

    def _reload_if_changed(self) -> None:
        if self._path is None or self._clock.now_s() < self._next_check_s:
            return
        self._next_check_s = self._clock.now_s() + RELOAD_S
        stamp = self._stamp_of()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._load(self._path)
        except ConfigError as error:
            self._log.error("the keys stay as they were: their file cannot be used", reason=str(error))
            return
        self._index()
        self._log.info("keys read again", keys=len(self._filed), file=str(self._path))

    def _stamp_of(self) -> _Stamp | None:
        """Return a stamp that differs once the file changes; None without a file."""
        assert self._path is not None
        try:
            status = self._path.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size
