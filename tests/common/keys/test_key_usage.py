"""What keys used: added up in the database, by several writers, for its owner's eyes."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cohort.common.errors import ConfigError
from cohort.common.keys.key_usage import Amounts, UsageStore, Where, day_of


def test_rows_add_up_over_writers_and_days(tmp_path: Path) -> None:
    path = tmp_path / "a new? %41" / "usage.sqlite3"
    UsageStore(path).close()

    def write(number: int) -> None:
        store = UsageStore(path)
        for _ in range(10):
            store.add({Where(f"2026-01-0{1 + number % 2}", "key-1", "rt"): ("alice", Amounts(1, 10, 5, 2))})
        store.close()

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(8)))
    store = UsageStore(path, read_only=True)
    rows = store.rows(since="2026-01-01")
    assert [(row.date, row.requests, row.prompt_tokens, row.completion_tokens, row.refused) for row in rows] == [
        ("2026-01-02", 40, 400, 200, 80),
        ("2026-01-01", 40, 400, 200, 80),
    ]
    assert len(store.rows(since="2026-01-02")) == len(store.rows(since="2026-01-01", until="2026-01-01")) == 1
    assert store.rows(since="2026-01-01", key_id="key-2") == []
    with pytest.raises(sqlite3.OperationalError):
        store.forget("2027")
    store.close()
    assert path.stat().st_mode & 0o077 == 0 and path.parent.stat().st_mode & 0o077 == 0
    store = UsageStore(path)
    store.forget("2026-01-02")
    assert [row.date for row in store.rows(since="2000")] == ["2026-01-02"]
    store.close()


def test_a_renamed_key_keeps_its_rows(tmp_path: Path) -> None:
    store = UsageStore(tmp_path / "u")
    for name in ("old", "new"):
        store.add({Where("2026-01-01", "key-1", "be"): (name, Amounts(requests=1))})
    [row] = store.rows(since="2026")
    assert (row.key_name, row.requests) == ("new", 2)
    store.close()


def test_what_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is none yet"):
        UsageStore(tmp_path / "u", read_only=True)
    store = UsageStore(tmp_path / "u")
    store._db.execute("PRAGMA user_version = 9")
    store.close()
    with pytest.raises(ConfigError, match="has schema version 9"):
        UsageStore(tmp_path / "u")
    (tmp_path / "v").write_bytes(b"no database" * 500)
    with pytest.raises(sqlite3.DatabaseError):
        UsageStore(tmp_path / "v")


def test_rows_of_before_go_on(tmp_path: Path) -> None:
    """Of a database without SLOs: read as it is, and counted on after a gateway has opened it."""
    path, where = tmp_path / "u", Where("2026-01-01", "key-1", "rt")
    store = UsageStore(path)
    store.add({where: ("alice", Amounts(1, 10, 5, 2))})
    for column in ("slo_requests", "slo_met"):
        store._db.execute(f"ALTER TABLE usage DROP COLUMN {column}")
    store._db.execute("PRAGMA user_version = 1")
    store.close()
    before = UsageStore(path, read_only=True)
    [row] = before.rows(since="2026")
    assert (row.requests, row.slo_requests, row.slo_attainment) == (1, 0, None)
    before.close()
    for _ in range(2):
        store = UsageStore(path)
        store.add({where: ("alice", Amounts(1, 0, 0, 0, 2, 1))})
        store.close()
    [row] = UsageStore(path, read_only=True).rows(since="2026")
    assert (row.requests, row.slo_requests, row.slo_met, row.slo_attainment) == (3, 4, 2, 0.5)


def test_days_are_those_of_utc() -> None:
    assert (day_of(0.0), day_of(86_399.9), day_of(86_400.0)) == ("1970-01-01", "1970-01-01", "1970-01-02")
