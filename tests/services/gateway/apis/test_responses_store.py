"""Kept responses: bounded by count, bytes and age, and each key's share of them."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.errors import ConfigError
from cohort.services.gateway.apis.responses_api_store import (
    ITEM_BYTES,
    ROW_BYTES,
    Lengths,
    ResponseStore,
    StoredResponse,
)
from tests.examples import examples


def opened(tmp_path: Path, *, owner_share: float = 1.0, **options: Any) -> ResponseStore:
    options = {"most": 100, "most_bytes": 1 << 30, "retention_s": 3600.0, **options}
    return ResponseStore(tmp_path / "responses.sqlite", owner_share=owner_share, **options)


def row(name: str, owner: str = "a", size: int = 100, created_at: int = 1000) -> StoredResponse:
    items = [("item", b"i" * (size - size // 2))]
    return StoredResponse(name, owner, created_at, b"r" * (size // 2), items)


def kept(store: ResponseStore, *names: str, owner: str = "a") -> list[str]:
    return [name for name in names if store.get(name, owner, 1001.0) is not None]


def test_a_response_is_kept_for_its_owner(tmp_path: Path) -> None:
    store = opened(tmp_path)
    assert store.add(row("r1"))
    found = store.get("r1", "a", 1001.0)
    assert found == row("r1") and store.get("r1", "b", 1001.0) is None and store.get("r2", "a", 1001.0) is None
    assert not store.delete("r1", "b", 1001.0) and store.delete("r1", "a", 1001.0)
    assert not store.delete("r1", "a", 1001.0) and store.in_use() == (0, 0)


def test_beyond_the_count_the_oldest_go(tmp_path: Path) -> None:
    store = opened(tmp_path, most=2)
    for name in ("r1", "r2", "r3"):
        assert store.add(row(name))
    assert kept(store, "r1", "r2", "r3") == ["r2", "r3"]


def test_beyond_the_bytes_the_oldest_go_and_what_never_fits_is_not_kept(tmp_path: Path) -> None:
    store = opened(tmp_path, most_bytes=3 * (100 + ROW_BYTES + ITEM_BYTES))
    for name in ("r1", "r2", "r3"):
        assert store.add(row(name))
    assert store.in_use() == (3, 3 * (100 + ROW_BYTES + ITEM_BYTES))
    assert store.add(row("r4", size=200))
    assert kept(store, "r1", "r2", "r3", "r4") == ["r3", "r4"]
    assert not store.add(row("r5", size=5000)) and kept(store, "r3", "r4", "r5") == ["r3", "r4"]


def test_one_key_has_its_share_and_pushes_out_no_other(tmp_path: Path) -> None:
    store = opened(tmp_path, owner_share=0.5, most=4)
    assert store.add(row("b1", "b"))
    for index in range(10):
        assert store.add(row(f"a{index}"))
    assert kept(store, "a7", "a8", "a9") == ["a8", "a9"] and kept(store, "b1", owner="b") == ["b1"]
    for owner in ("c", "d", "e"):  # more keys than shares: the one with most gives first
        assert store.add(row(owner, owner))
    assert store.in_use()[0] == 4 and kept(store, "a8", "a9") == [] and kept(store, "b1", owner="b") == ["b1"]


def test_what_is_too_old_is_not_shown_and_then_deleted(tmp_path: Path) -> None:
    store = opened(tmp_path, retention_s=60.0)
    store.add(row("old", created_at=1000))
    store.add(row("new", created_at=1050))
    assert store.get("old", "a", 1060.0) is None and store.get("new", "a", 1060.0) is not None
    assert store.in_use()[0] == 2  # a wrong clock must be able to hide and not to delete
    store.sweep(1061.0)
    assert store.in_use()[0] == 1 and store.swept_at_s() == 1061.0


def test_it_is_there_after_a_restart_and_its_space_is_given_back(tmp_path: Path) -> None:
    store = opened(tmp_path)
    for index in range(50):
        store.add(row(f"r{index}", size=20_000))
    store.close()
    store = opened(tmp_path)
    assert store.in_use()[0] == 50 and store.get("r49", "a", 1001.0) == row("r49", size=20_000)
    for index in range(50):
        store.delete(f"r{index}", "a", 1001.0)
    store.sweep(1001.0)
    store.close()
    assert (tmp_path / "responses.sqlite").stat().st_size < 500_000


def test_nothing_is_kept_where_none_may_be(tmp_path: Path) -> None:
    store = opened(tmp_path, most_bytes=0)
    assert not store.add(row("r1")) and store.in_use() == (0, 0)


def test_a_database_of_another_version_is_refused_by_name(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store._db.execute("UPDATE meta SET value = 99 WHERE name = 'schema_version'")
    store.close()
    with pytest.raises(ConfigError, match="schema version 99"):
        opened(tmp_path)


@settings(max_examples=examples(1))
@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9)), max_size=12),
    st.integers(1, 5),
    st.sampled_from([None, *"abcdefg"]),
    st.booleans(),
)
def test_a_page_is_what_the_whole_list_has_there(
    items: list[tuple[str, int]], limit: int, after: str | None, newest_first: bool
) -> None:
    """Against the list in memory; ids may repeat, as clients choose them."""
    with TemporaryDirectory() as folder:
        store = opened(Path(folder))
        kept_items = [(name, bytes([place]) * size) for place, (name, size) in enumerate(items)]
        store.add(row("other"))
        store.add(StoredResponse("r", "a", 1000, b"{}", kept_items))
        page = store.page("r", "a", 1001.0, limit=limit, after=after, newest_first=newest_first)
        assert page is not None and store.page("r", "b", 1001.0, limit=1, after=None, newest_first=True) is None
        found = store.items(page)
        store.close()
    rest = kept_items[::-1] if newest_first else kept_items
    if after is not None:
        names = [name for name, _ in rest]
        rest = rest[names.index(after) + 1 :] if after in names else []
    expected = [data for _, data in rest[:limit]]
    assert (found[::-1] if newest_first else found) == expected
    assert (page.bytes, page.more) == (sum(map(len, expected)), len(rest) > limit)


def test_lengths_are_those_of_what_is_read(tmp_path: Path) -> None:
    store = opened(tmp_path)
    store.add(made := row("r", size=1000))
    lengths = store.lengths("r", "a", 1001.0)
    assert lengths == Lengths(500, made.bytes) and store.answer("r", "a", 1001.0) == made.response
    assert store.lengths("r", "b", 1001.0) is None and store.answer("r", "b", 1001.0) is None


def test_items_leave_with_their_response(tmp_path: Path) -> None:
    store = opened(tmp_path, most=2, retention_s=60.0)
    for index in range(5):
        store.add(row(f"r{index}", created_at=1000 + index))
    store.delete("r4", "a", 1001.0)
    assert store._db.execute("SELECT count(*) FROM items").fetchone()[0] == 1
    store.sweep(2000.0)
    assert store._db.execute("SELECT count(*) FROM items").fetchone()[0] == 0


def test_a_database_of_the_first_format_keeps_its_conversations(tmp_path: Path) -> None:
    items = [
        {"type": "message", "id": f"msg_{index}", "role": "user", "content": [{"type": "input_text", "text": text}]}
        for index, text in enumerate(["plain", "Zürich \u2028 \x00", 'quoted "; --'])
    ]
    old = sqlite3.connect(tmp_path / "responses.sqlite")
    old.executescript(FIRST_FORMAT)
    data = [json.dumps(items).encode(), msgspec.json.encode([]), msgspec.json.encode(items)]
    old.executemany(
        "INSERT INTO responses (id, owner, bytes, created_at, response, items) VALUES (?, 'a', 900, 1000, ?, ?)",
        [(f"r{index}", b"{}", each) for index, each in enumerate(data)],
    )
    old.commit()
    old.close()
    store = opened(tmp_path)
    for name, expected in (("r0", items), ("r1", []), ("r2", items)):
        found = store.get(name, "a", 1001.0)
        assert found is not None and found.response == b"{}"
        assert [(each, json.loads(data)) for each, data in found.items] == [(each["id"], each) for each in expected]
    assert store.add(row("r3")) and store.in_use()[0] == 4


FIRST_FORMAT = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL, response BLOB NOT NULL, items BLOB NOT NULL
) STRICT;
CREATE INDEX responses_by_owner ON responses (owner, seq, bytes);
CREATE INDEX responses_by_age ON responses (created_at);
INSERT INTO meta VALUES ('schema_version', 1);
"""
WRITER = """
import sys
from pathlib import Path
from tests.services.gateway.apis.test_responses_store import opened, row
store, name = opened(Path(sys.argv[1]), most=60), sys.argv[2]
print("open", flush=True)
sys.stdin.readline()
for index in range(50):
    assert store.add(row(f"{name}{index}", name))
    assert store.get(f"{name}{index}", name, 1001.0) is not None
    if index % 2 == 0:
        assert store.delete(f"{name}{index}", name, 1001.0)
    store.sweep(1001.0)
    assert store.in_use()[0] <= 60
"""


def test_two_processes_write_one_database(tmp_path: Path) -> None:
    """Neither loses what it wrote, however their transactions interleave."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    both = [
        subprocess.Popen([*command, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for name in ("a", "b")
    ]
    try:
        for each in both:
            assert each.stdout is not None and each.stdout.readline() == b"open\n"
        ends = []
        for each in both:  # neither begins before both have it open
            assert each.stdin is not None
            each.stdin.write(b"go\n")
            each.stdin.flush()
        for each in both:
            ends.append((each.communicate(timeout=120)[1].decode(), each.returncode))
        assert ends == [("", 0)] * 2
    finally:
        for each in both:
            each.kill()
            each.communicate()
    store = opened(tmp_path, most=60)
    odd = [index for index in range(50) if index % 2]
    for name in ("a", "b"):
        assert kept(store, *(f"{name}{index}" for index in range(50)), owner=name) == [f"{name}{i}" for i in odd]
    assert store.in_use()[0] == 2 * len(odd)
