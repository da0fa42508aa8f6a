"""The responses that are kept: in one SQLite database, bounded by count, bytes and age, each for its owner alone.

A response is kept with all its items, those of earlier responses included, so that a conversation survives the loss of
its beginning. Each item is a row, so that a page of them is read without the others; lengths are read without contents.
Beyond a bound the oldest go: of an owner beyond its share first, then of the largest owner. One thread
(`sqlite_file.OnThread`), of `responses_archive.py`, calls it; times are wall-clock seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from cohort.common.sqlite_file import opened, transaction

SCHEMA_VERSION = 2
ROW_BYTES = 256
"""Size of a response besides its JSON: ids, times, index entries."""
ITEM_BYTES = 64
"""The same of an item."""
SHRINK_PAGES = 1024  # given back to the disk at once, 4 MiB
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE responses (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT NOT NULL UNIQUE,
    owner TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    response BLOB NOT NULL
) STRICT;
CREATE INDEX responses_by_owner ON responses (owner, seq, bytes);
CREATE INDEX responses_by_age ON responses (created_at);
"""
_ITEMS = """
CREATE TABLE items (
    response INTEGER NOT NULL REFERENCES responses (seq) ON DELETE CASCADE,
    place INTEGER NOT NULL,
    id TEXT NOT NULL,
    data BLOB NOT NULL
) STRICT;
CREATE UNIQUE INDEX items_by_place ON items (response, place)
"""
_UPGRADES = {
    1: f"""{_ITEMS};
INSERT INTO items SELECT seq, each.key, json_extract(each.value, '$.id'), CAST(each.value AS BLOB)
    FROM responses, json_each(CAST(items AS TEXT)) AS each;
ALTER TABLE responses DROP COLUMN items
"""
}
_MINE = "id = ? AND owner = ? AND created_at > ?"


class StoredResponse(msgspec.Struct, frozen=True):
    """`response`: its JSON as it was answered; `items`: the ids and the JSON of what it was made from."""

    id: str
    owner: str
    created_at: int
    response: bytes
    items: list[tuple[str, bytes]]

    @property
    def bytes(self) -> int:
        return len(self.response) + sum(len(data) + ITEM_BYTES for _, data in self.items) + ROW_BYTES


class Lengths(msgspec.Struct, frozen=True):
    """Bytes of a response's own JSON, and of all that is kept with it."""

    response: int
    all: int


class ItemsPage(msgspec.Struct, frozen=True):
    """Some items of one response, `bytes` long, from the places `low` to `high`. `more`: others follow."""

    response: int
    low: int
    high: int
    bytes: int
    more: bool


class ResponseStore:
    def __init__(self, path: Path, *, most: int, most_bytes: int, owner_share: float, retention_s: float) -> None:
        """Open or create. Raises `ConfigError` for another version, `sqlite3.Error` for an unusable database."""
        self._retention_s = retention_s
        self._most = most
        self._most_bytes = most_bytes
        self._own_most = max(1, int(most * owner_share))
        self._own_most_bytes = int(most_bytes * owner_share)
        self._db = opened(path, f"state.folder: {path}", SCHEMA_VERSION, _SCHEMA + _ITEMS, _UPGRADES, gives_back=True)

    def close(self) -> None:
        self._db.close()

    def add(self, row: StoredResponse) -> bool:
        """Keep a response and drop the excess. False: it exceeds its owner's share. Existing ones stay: two gateways
        may end one stream."""
        if row.bytes > self._own_most_bytes:
            return False
        with transaction(self._db):
            known = self._db.execute("SELECT 1 FROM responses WHERE id = ? AND owner = ?", (row.id, row.owner))
            if known.fetchone() is not None:
                return True
            added = self._db.execute(
                "INSERT INTO responses (id, owner, bytes, created_at, response) VALUES (?, ?, ?, ?, ?)",
                (row.id, row.owner, row.bytes, row.created_at, row.response),
            )
            self._db.executemany(
                "INSERT INTO items (response, place, id, data) VALUES (?, ?, ?, ?)",
                [(added.lastrowid, place, *item) for place, item in enumerate(row.items)],
            )
            while self._exceeds(self._in_use(row.owner), self._own_most, self._own_most_bytes):
                self._drop_oldest(row.owner)
            while self._exceeds(self._in_use(None), self._most, self._most_bytes):
                self._drop_oldest(self._largest_owner())
        return True

    def get(self, response_id: str, owner: str, now_s: float) -> StoredResponse | None:
        """Return a response; None also for another owner's and for one that is too old."""
        row = self._mine("seq, created_at, response", response_id, owner, now_s)
        if row is None:
            return None
        seq, created_at, response = row
        items = self._db.execute("SELECT id, data FROM items WHERE response = ? ORDER BY place", (seq,))
        return StoredResponse(response_id, owner, created_at, response, [tuple(item) for item in items])

    def lengths(self, response_id: str, owner: str, now_s: float) -> Lengths | None:
        row = self._mine("length(response), bytes", response_id, owner, now_s)
        return None if row is None else Lengths(*row)

    def answer(self, response_id: str, owner: str, now_s: float) -> bytes | None:
        """Return a response's own JSON."""
        row = self._mine("response", response_id, owner, now_s)
        return None if row is None else row[0]

    def page(
        self, response_id: str, owner: str, now_s: float, *, limit: int, after: str | None, newest_first: bool
    ) -> ItemsPage | None:
        """Return where a page of items lies, and its length; one after an unknown item is empty."""
        row = self._mine("seq", response_id, owner, now_s)
        if row is None:
            return None
        [seq] = row
        # Of items with one id the first in the page's order counts.
        end, beyond, order = ("max", "<", "DESC") if newest_first else ("min", ">", "ASC")
        where, values = "", [seq]
        if after is not None:
            where = f" AND place {beyond} (SELECT {end}(place) FROM items WHERE response = ? AND id = ?)"
            values += [seq, after]
        rows = self._db.execute(
            f"SELECT place, length(data) FROM items WHERE response = ?{where} ORDER BY place {order} LIMIT ?",
            (*values, limit + 1),
        ).fetchall()
        places, lengths = [place for place, _ in rows[:limit]], [length for _, length in rows[:limit]]
        low, high = min(places, default=0), max(places, default=-1)
        return ItemsPage(seq, low, high, sum(lengths), more=len(rows) > limit)

    def items(self, page: ItemsPage) -> list[bytes]:
        """Return the page's items, oldest first."""
        rows = self._db.execute(
            "SELECT data FROM items WHERE response = ? AND place BETWEEN ? AND ? ORDER BY place",
            (page.response, page.low, page.high),
        )
        return [data for (data,) in rows]

    def _mine(self, columns: str, response_id: str, owner: str, now_s: float) -> Sequence[Any] | None:
        found = self._db.execute(
            f"SELECT {columns} FROM responses WHERE {_MINE}", (response_id, owner, now_s - self._retention_s)
        ).fetchone()
        return None if found is None else tuple(found)

    def delete(self, response_id: str, owner: str, now_s: float) -> bool:
        """Delete a response; return whether there was one."""
        changed = self._db.execute(
            f"DELETE FROM responses WHERE {_MINE}", (response_id, owner, now_s - self._retention_s)
        )
        return changed.rowcount == 1

    def sweep(self, now_s: float) -> None:
        """Drop what is too old, and give freed space back to the disk."""
        with transaction(self._db):
            self._db.execute("DELETE FROM responses WHERE created_at <= ?", (now_s - self._retention_s,))
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('swept_at', ?)", (int(now_s),))
        self._db.executescript(f"PRAGMA incremental_vacuum({SHRINK_PAGES})")  # `execute` frees a single page

    def swept_at_s(self) -> float | None:
        """Return the wall clock at the last sweep, of this process or an earlier one; None before the first."""
        row = self._db.execute("SELECT value FROM meta WHERE name = 'swept_at'").fetchone()
        return None if row is None else float(row[0])

    def in_use(self) -> tuple[int, int]:
        """Return the number of responses and their bytes."""
        return self._in_use(None)

    def _in_use(self, owner: str | None) -> tuple[int, int]:
        where, values = ("", ()) if owner is None else (" WHERE owner = ?", (owner,))
        row = self._db.execute(f"SELECT count(*), coalesce(sum(bytes), 0) FROM responses{where}", values).fetchone()
        return row[0], row[1]

    @staticmethod
    def _exceeds(used: tuple[int, int], most: int, most_bytes: int) -> bool:
        return used[0] > most or used[1] > most_bytes

    def _drop_oldest(self, owner: str) -> None:
        self._db.execute("DELETE FROM responses WHERE seq = (SELECT min(seq) FROM responses WHERE owner = ?)", (owner,))

    def _largest_owner(self) -> str:
        row = self._db.execute(
            "SELECT owner FROM responses GROUP BY owner ORDER BY sum(bytes) DESC, owner LIMIT 1"
        ).fetchone()
        return str(row[0])
