"""The file of API keys: who may ask, what each may use. Written by `cohort keys`, read by gateways.

A key is shown once, when it is made. The file holds its SHA-256 with the file's salt, never the key. A slow hash would
be wrong: a key is 256 random bits, so there is no dictionary to try, and one fast hash per request keeps a refusal
cheap; the salt keeps one table of hashes from serving against two files.

A change is written beside the file and renamed over it, under a lock, with mode 0600: a reader sees the old file or the
new one.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import os
import re
import secrets
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec

from cohort.common.config.gateway import KeyLimits
from cohort.common.errors import ConfigError
from cohort.common.keys.private_files import write_private
from cohort.common.types import TrafficClass

VERSION = 1
PREFIX = "ck"
MAX_KEYS = 1000
"""Entries of one file, revoked ones included: each is compared with every request, and is a label of metrics."""
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SALT_BYTES = 16

Limit = Annotated[int, msgspec.Meta(ge=0, le=10**15)]
Weight = Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class OwnLimits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of one key, as in `KeyLimits`; None = the configuration's for every key."""

    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    tokens_per_day: Limit | None = None
    concurrent_requests: Limit | None = None

    def over(self, defaults: KeyLimits) -> KeyLimits:
        named = {name: value for name in self.__struct_fields__ if (value := getattr(self, name)) is not None}
        return msgspec.structs.replace(defaults, **named)


NO_LIMITS = OwnLimits()


class StoredKey(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Entry of one key. `hash`: SHA-256 of salt and key, hexadecimal. `created_s`, `revoked_s`: wall clock."""

    id: str
    name: str
    hash: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{64}$")]
    created_s: int
    revoked_s: int | None = None
    admin: bool = False
    weight: Weight = 1.0
    rt: OwnLimits = NO_LIMITS
    be: OwnLimits = NO_LIMITS

    def limits(self, traffic_class: TrafficClass) -> OwnLimits:
        return self.rt if traffic_class == "rt" else self.be


class KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    salt: str
    keys: tuple[StoredKey, ...] = ()

    @property
    def salt_bytes(self) -> bytes:
        return bytes.fromhex(self.salt)

    def active(self) -> list[StoredKey]:
        return [key for key in self.keys if key.revoked_s is None]

    def named(self, name: str) -> StoredKey | None:
        """Find a key by name or id; of several of one name the one that is not revoked, else the latest."""
        found = [key for key in self.keys if name in (key.name, key.id)]
        return max(found, key=lambda key: (key.revoked_s is None, key.created_s), default=None)


def hash_key(salt: bytes, key: str) -> bytes:
    return hashlib.sha256(salt + key.encode("utf-8", "surrogateescape")).digest()


def matching(given: bytes, hashes: Sequence[bytes]) -> int | None:
    """Return the index of a hash. Each is compared in constant time: the time discloses nothing about any."""
    found = [index for index, known in enumerate(hashes) if hmac.compare_digest(given, known)]
    return found[0] if found else None


def new_key(
    file: KeyFile,
    name: str,
    now_s: int,
    *,
    admin: bool = False,
    weight: float = 1.0,
    rt: OwnLimits = NO_LIMITS,
    be: OwnLimits = NO_LIMITS,
) -> tuple[KeyFile, StoredKey, str]:
    """Return the file with a new key, its entry, and the key itself. Raises `ConfigError` for a name that is taken or
    that no metric could have, and if the file is full."""
    if NAME.fullmatch(name) is None:
        raise ConfigError(f"{name!r}: a key's name is 1 to 64 letters, digits, dots, dashes and underscores")
    if any(key.name == name for key in file.active()):
        raise ConfigError(f"there is a key named {name} already; revoke it, or choose another name")
    keys = list(file.keys)
    while len(keys) >= MAX_KEYS:
        oldest = min(
            (key for key in keys if key.revoked_s is not None), key=lambda key: key.revoked_s or 0, default=None
        )
        if oldest is None:
            raise ConfigError(f"the file holds {MAX_KEYS} keys, and none of them is revoked")
        keys.remove(oldest)
    key_id = f"key-{secrets.token_hex(6)}"
    secret = f"{PREFIX}_{key_id.removeprefix('key-')}_{secrets.token_urlsafe(32)}"
    digest = hash_key(file.salt_bytes, secret).hex()
    stored = StoredKey(key_id, name, digest, now_s, admin=admin, weight=weight, rt=rt, be=be)
    return msgspec.structs.replace(file, keys=(*keys, stored)), stored, secret


def revoked(file: KeyFile, name: str, now_s: int) -> tuple[KeyFile, StoredKey]:
    """Return the file with an active key revoked, and its entry. Raises `ConfigError` if there is no such key."""
    found = next((key for key in file.active() if name in (key.name, key.id)), None)
    if found is None:
        raise ConfigError(f"no active key is named {name}")
    ended = msgspec.structs.replace(found, revoked_s=now_s)
    return msgspec.structs.replace(file, keys=tuple(ended if key is found else key for key in file.keys)), ended


def read_keys(path: Path, *, option: str = "keys.file") -> KeyFile:
    """Read a file of keys. Raises `ConfigError` if it is missing, others may write it, or it is none."""
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            data = file.read()
    except OSError as error:
        raise ConfigError(
            f"{option}: {path}: cannot be read: {error.strerror}; `cohort keys add NAME --file {path}` makes one"
        ) from error
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{option}: {path}: others can write it (mode {mode:04o}); `chmod 600 {path}`")
    try:
        read = msgspec.json.decode(data, type=KeyFile)
        salt = read.salt_bytes
    except (msgspec.MsgspecError, ValueError) as error:
        raise ConfigError(f"{option}: {path}: no file of API keys: {error}") from error
    if read.version != VERSION:
        raise ConfigError(f"{option}: {path}: version {read.version}; this Cohort reads {VERSION}")
    names = [key.name for key in read.active()]
    if len(salt) < SALT_BYTES or len(read.keys) > MAX_KEYS or len(set(names)) != len(names):
        raise ConfigError(f"{option}: {path}: a salt of {SALT_BYTES} bytes, {MAX_KEYS} keys at most, no name twice")
    if wrong := [key.name for key in read.keys if NAME.fullmatch(key.name) is None]:
        raise ConfigError(f"{option}: {path}: no name of a key: {wrong[0]!r}")
    return read


@contextmanager
def editing(path: Path) -> Iterator[list[KeyFile]]:
    """Yield the content of the file, or of a new one, in a list of one, whose element is written when the block ends.
    One editor at a time; an error in the block leaves the file as it was. Raises `ConfigError`."""
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before = read_keys(path, option="--file") if path.exists() else None
        held = [before or KeyFile(VERSION, secrets.token_hex(SALT_BYTES))]
        yield held
        if held[0] != before:
            _write(path, held[0])
    finally:
        os.close(lock)


def _write(path: Path, file: KeyFile) -> None:
    data = msgspec.json.format(msgspec.json.encode(file), indent=1) + b"\n"
    try:
        write_private(path, data)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)  # a revoked key stays revoked, whatever happens to the machine now
        finally:
            os.close(folder)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from error
