"""Stores behind threads of their own, and tables that get from one version to the next."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from cohort.common import sqlite_file
from cohort.common.errors import ConfigError
from cohort.common.sqlite_file import OnThread, opened, use_log, version_of

META = "CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT; CREATE TABLE things (a INTEGER)"
HEADER = "CREATE TABLE things (a INTEGER);"
UPGRADES = {
    1: "ALTER TABLE things ADD COLUMN b INTEGER; INSERT INTO things VALUES (1, 2)",
    2: "UPDATE things SET b = 3",
}


class Store:
    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.closed_in: threading.Thread | None = None

    def close(self) -> None:
        self.closed_in = threading.current_thread()


async def test_a_store_is_opened_used_and_closed_in_its_thread() -> None:
    held = OnThread(Store, "kept")
    assert not held.opened
    store = await held.run(lambda store: store)
    assert held.opened and store.thread.name.startswith("kept")
    assert await held.run(lambda store: (store, threading.current_thread())) == (store, store.thread)
    held.close()
    assert store.closed_in is store.thread and not held.opened


async def test_a_store_that_does_not_open_is_tried_again() -> None:
    tries: list[int] = []

    def opening() -> Store:
        tries.append(1)
        if len(tries) < 3:
            raise sqlite3.OperationalError("disk I/O error")
        return Store()

    held = OnThread(opening, "kept")
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError):
            await held.open()
        assert not held.opened
    await held.open()
    assert held.opened and len(tries) == 3
    held.close()


def test_a_store_that_was_never_opened_is_closed_without_a_word() -> None:
    OnThread(Store, "kept").close()


@pytest.mark.parametrize("schema", [META, HEADER])
def test_tables_go_from_version_to_version_once(tmp_path: Path, schema: str) -> None:
    path = tmp_path / "d.sqlite"
    empty = sqlite3.connect(path, isolation_level=None)
    assert version_of(empty) == 0
    empty.close()
    first = opened(path, "it", 1, schema)
    assert version_of(first) == 1
    first.close()
    for _ in range(2):
        db = opened(path, "it", 3, schema, UPGRADES)
        assert version_of(db) == 3
        assert [tuple(row) for row in db.execute("SELECT a, b FROM things")] == [(1, 3)]
        db.close()
    for version in (2, 4):
        with pytest.raises(ConfigError, match=f"it has schema version 3, this version of Cohort reads {version}"):
            opened(path, "it", version, schema, UPGRADES)


@pytest.mark.parametrize("schema", [META, HEADER])
def test_an_upgrade_that_fails_changes_nothing(tmp_path: Path, schema: str) -> None:
    db = opened(tmp_path / "d.sqlite", "it", 1, schema)
    with pytest.raises(sqlite3.OperationalError):
        opened(tmp_path / "d.sqlite", "it", 3, schema, {1: UPGRADES[1], 2: "UPDATE nothing SET b = 3"})
    assert version_of(db) == 1
    assert [row["name"] for row in db.execute("PRAGMA table_info(things)")] == ["a"]
    db.close()


def test_a_database_that_another_process_makes_just_now_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = sqlite3.connect(tmp_path / "new", isolation_level=None, check_same_thread=False)
    maker.execute("BEGIN IMMEDIATE")
    maker.execute("CREATE TABLE things (a INTEGER)")
    late = sqlite3.connect(tmp_path / "new", isolation_level=None)
    with monkeypatch.context() as patch:
        patch.setattr(sqlite_file, "BUSY_S", 0.05)
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            use_log(late)
    ending = threading.Timer(0.2, maker.execute, ("COMMIT",))
    ending.start()
    use_log(late)
    ending.join()
    assert late.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    maker.close()
    late.close()
