"""`cohort keys add` and its siblings, and that a cluster's key is still made as before."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from cohort.common.keys.key_file import OwnLimits, hash_key, read_keys
from cohort.common.keys.key_usage import Amounts, UsageStore, Where, day_of
from cohort.services.cli import __main__ as cli


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "keys.json"
    monkeypatch.setenv("COHORT_KEYS_FILE", str(path))
    return path


def test_a_keys_life(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = ("--limit", "requests_per_minute=60", "--limit", "rt.tokens_per_day=0", "--weight", "2.5")
    assert cli.main(["keys", "add", "alice", *limits]) == 0
    said = capsys.readouterr()
    secret = said.out.strip()
    assert secret.startswith("ck_") and secret not in said.err and "shown this once" in said.err
    stored = read_keys(file)
    [key] = stored.keys
    assert key.hash == hash_key(stored.salt_bytes, secret).hex()
    assert (key.weight, key.admin) == (2.5, False)
    assert (key.rt, key.be) == (OwnLimits(requests_per_minute=60, tokens_per_day=0), OwnLimits(requests_per_minute=60))
    change = ("--limit", "rt.tokens_per_day=default", "--limit", "be.concurrent_requests=3")
    assert cli.main(["keys", "set", "alice", *change]) == 0
    [key] = read_keys(file).keys
    assert (key.rt.tokens_per_day, key.be.concurrent_requests, key.weight) == (None, 3, 2.5)
    capsys.readouterr()
    assert cli.main(["keys", "show", key.id]) == 0
    shown = capsys.readouterr().out
    assert "be.concurrent_requests   3\n" in shown and "rt.tokens_per_day        as configured\n" in shown
    assert cli.main(["keys", "revoke", "alice"]) == 0
    assert cli.main(["keys", "add", "alice", "--admin"]) == 0
    capsys.readouterr()
    assert cli.main(["keys", "list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 2 and "revoked" in listed[0] and listed[1].endswith("active admin")
    assert all(each not in "".join(listed) for each in (secret, key.hash))


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["add", "a b"], "a key's name"),
        (["add", "a", "--limit", "tokens=5"], "LIMIT is one of"),
        (["add", "a", "--limit", "xx.tokens_per_day=5"], "LIMIT is one of"),
        (["add", "a", "--limit", "tokens_per_day=-5"], "LIMIT is one of"),
        (["add", "a", "--weight", "0"], "--weight"),
        (["add", "a", "--weight", "nan"], "--weight"),
        (["revoke", "nobody"], "no active key"),
        (["set", "nobody", "--weight", "2"], "no active key"),
        (["show", "nobody"], "no key is named"),
        (["usage", "--usage-file", "/nonexistent/u"], "there is none yet"),
    ],
)
def test_what_is_wrong_is_said_and_changes_nothing(
    file: Path, capsys: pytest.CaptureFixture[str], words: list[str], reason: str
) -> None:
    assert cli.main(["keys", "add", "other"]) == 0
    before = file.read_bytes()
    capsys.readouterr()
    assert cli.main(["keys", *words]) == 2
    assert reason in capsys.readouterr().err and file.read_bytes() == before


def test_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = UsageStore(tmp_path / "u")
    today, long_ago = day_of(time.time()), "2001-01-01"
    store.add({Where(day, "key-1", "rt"): ("alice", Amounts(1, 20, 300, 4)) for day in (today, long_ago)})
    store.add({Where(today, "key-2", "be"): ("bob", Amounts(5, 6, 7, 8, 4, 3))})
    store.close()
    where = ["--usage-file", str(tmp_path / "u")]
    assert cli.main(["keys", "usage", *where]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [
        [today, "alice", "rt", "1", "20", "300", "4", "0", "-"],
        [today, "bob", "be", "5", "6", "7", "8", "4", "75.0%"],
    ]
    assert cli.main(["keys", "usage", *where, "--key", "bob", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "date": today,
        "key_id": "key-2",
        "key_name": "bob",
        "class": "be",
        "requests": 5,
        "prompt_tokens": 6,
        "completion_tokens": 7,
        "refused": 8,
        "slo_requests": 4,
        "slo_met": 3,
    }


def test_a_clusters_key_is_made_as_before(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["keys", str(tmp_path / "cluster.key")]) == 0
    assert cli.main(["keys", str(tmp_path / "cluster.key")]) == 2
    assert cli.main(["keys", "--keep", str(tmp_path / "cluster.key")]) == 0
    assert "curve_secret_key_file" in capsys.readouterr().out
