"""The file of API keys: what it holds, who may change it, and that it is always whole."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cohort.common.config import KeyLimits
from cohort.common.errors import ConfigError
from cohort.common.keys import key_file
from cohort.common.keys.key_file import (
    KeyFile,
    OwnLimits,
    StoredKey,
    editing,
    hash_key,
    matching,
    new_key,
    read_keys,
    revoked,
)


def add(path: Path, name: str) -> str:
    with editing(path) as held:
        held[0], _, secret = new_key(held[0], name, 1)
    return secret


def test_a_key_is_stored_as_its_salted_hash_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "keys.json"
    secret = add(path, "alice")
    text = path.read_text(encoding="utf-8")
    assert secret not in text and secret.split("_", 2)[2] not in text
    file = read_keys(path)
    assert file.keys[0].hash == hashlib.sha256(bytes.fromhex(file.salt) + secret.encode()).hexdigest()
    assert len(secret.split("_", 2)[1]) == 12 and len(secret) >= 43 + 12
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    other = tmp_path / "other.json"
    add(other, "alice")
    assert read_keys(other).salt != file.salt


def test_every_hash_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bytes] = []

    def compare(given: bytes, known: bytes) -> bool:
        seen.append(known)
        return given == known

    monkeypatch.setattr(key_file.hmac, "compare_digest", compare)
    hashes = [hash_key(b"salt", name) for name in ("a", "b", "c")]
    assert matching(hashes[0], hashes) == 0 and seen == hashes
    assert matching(hash_key(b"salt", "d"), hashes) is None and seen == hashes * 2
    assert matching(hash_key(b"other", "a"), hashes) is None


def test_names_and_their_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys.json"
    monkeypatch.setattr(key_file, "MAX_KEYS", 2)
    for name in ("", "a b", 'a"', "é", "-a", "x" * 65):
        with pytest.raises(ConfigError, match="a key's name"):
            add(path, name)
    add(path, "alice")
    with pytest.raises(ConfigError, match="named alice already"):
        add(path, "alice")
    add(path, "bob")
    with pytest.raises(ConfigError, match="none of them is revoked"):
        add(path, "carol")
    with editing(path) as held:
        held[0], gone = revoked(held[0], "alice", 5)
    assert (gone.revoked_s, [key.name for key in read_keys(path).active()]) == (5, ["bob"])
    with pytest.raises(ConfigError, match="no active key"), editing(path) as held:
        held[0], _ = revoked(held[0], "alice", 6)
    add(path, "alice")  # in the place of the revoked one
    assert [key.name for key in read_keys(path).keys] == ["bob", "alice"]


def test_two_editors_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: add(path, f"k{number}"), range(24)))
    assert {key.name for key in read_keys(path).keys} == {f"k{number}" for number in range(24)}
    assert sorted(each.name for each in tmp_path.iterdir()) == [".keys.json.lock", "keys.json"]


def test_an_edit_that_fails_leaves_the_file_and_nothing_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.json"
    add(path, "alice")
    before = path.read_bytes()
    with pytest.raises(ZeroDivisionError), editing(path) as held:
        held[0], _, _ = new_key(held[0], "bob", 1)
        raise ZeroDivisionError

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(ConfigError, match="No space left"):
            add(path, "bob")
    assert path.read_bytes() == before
    assert sorted(each.name for each in tmp_path.iterdir()) == [".keys.json.lock", "keys.json"]


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, "alice")
    path.chmod(0o644)
    assert read_keys(path).keys
    for mode in (0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(ConfigError, match="others can write it"):
            read_keys(path)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"salt": "00"},
        {"salt": "not hexadecimal"},
        {"more": 1},
        {"keys": [{"id": "key-1", "name": "a", "hash": "00", "created_s": 1}]},
        {"keys": [{"id": f"key-{n}", "name": "a", "hash": "0" * 64, "created_s": 1} for n in range(2)]},
        {"keys": [{"id": "key-1", "name": 'a"} 1', "hash": "0" * 64, "created_s": 1}]},
        {"keys": [{"id": "key-1", "name": "a", "hash": "0" * 64, "created_s": 1, "weight": 0}]},
        {"keys": [{"id": "key-1", "name": "a", "hash": "0" * 64, "created_s": 1, "rt": {"requests_per_minute": -1}}]},
    ],
)
def test_what_is_no_file_of_keys_is_refused(tmp_path: Path, change: dict[str, object]) -> None:
    path = tmp_path / "keys.json"
    add(path, "alice")
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    with pytest.raises(ConfigError, match=r"keys\.file: .*keys\.json: "):
        read_keys(path)


def test_own_limits_win_and_the_others_are_the_configurations() -> None:
    own = OwnLimits(requests_per_minute=0, tokens_per_day=5)
    assert own.over(KeyLimits(requests_per_minute=9, tokens_per_minute=7)) == KeyLimits(0, 7, 5, 0)


def test_a_name_stands_for_its_active_key() -> None:
    old = StoredKey("key-1", "a", "0" * 64, 1, revoked_s=9)
    new = StoredKey("key-2", "a", "1" * 64, 0)
    file = KeyFile(1, "00" * 16, (new, old))
    assert (file.named("a"), file.named("key-1"), file.named("b")) == (new, old, None)
