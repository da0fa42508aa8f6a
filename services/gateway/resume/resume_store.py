"""Requests of resumable streams and what was generated for them, in one SQLite database that gateways of a box share.

    open ─▶ done ─▶ gone          open: a gateway (`holder`) generates it, or was killed while it did
      └───────────────▲           gone: it expired or was cancelled; only the digest of its token is left, for a 410

A request's row is written on admission, its tokens before a client sees them. A gateway that claims an open stream
becomes its holder; the former one learns that when an append is refused. Each change is a transaction in a write-ahead
log; `synchronous=NORMAL` keeps a killed process's writes. Tokens of streams are digests. Deleted content is
overwritten. Belongs to the thread of `resume_journal.py`; times are wall-clock seconds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cohort.common.errors import RequestError
from cohort.common.keys.private_files import private_folder
from cohort.common.messages import TokenLogprob
from cohort.common.sqlite_file import opened, transaction
from cohort.common.tokens import packed, unpacked
from cohort.common.types import FinishReason, Request
from cohort.services.gateway.generation.delta import Delta, StreamKind

VERSION = 4
_UPGRADES = {
    1: "",
    2: "UPDATE streams SET charged = charged << 40",
    3: "ALTER TABLE streams ADD COLUMN background INTEGER NOT NULL DEFAULT 0",
}
"""1 knew only chunks; 2 had a flag in `charged`: 1 becomes more tokens than any stream has; 3 knew no background."""
ROW_BYTES = 1024
"""Bytes counted for each stream besides its content."""
GONE_S = 3600.0
"""Time for which an expired stream is remembered."""
MAX_GONE = 10_000
_SCHEMA = """
CREATE TABLE streams (
    token TEXT PRIMARY KEY,
    owner TEXT NOT NULL,
    holder TEXT NOT NULL,
    state TEXT NOT NULL,
    expires_s REAL NOT NULL,
    bytes INTEGER NOT NULL,
    charged INTEGER NOT NULL DEFAULT 0,
    record BLOB,
    ending BLOB,
    background INTEGER NOT NULL DEFAULT 0
) STRICT, WITHOUT ROWID;
CREATE INDEX streams_by_time ON streams (expires_s);
CREATE TABLE said (
    number INTEGER PRIMARY KEY,
    token TEXT NOT NULL,
    data BLOB NOT NULL
) STRICT;
CREATE INDEX said_by_token ON said (token);
"""


class StreamRecord(msgspec.Struct, frozen=True):
    """Request for any gateway to submit again: its body and headers, parsed anew, and its prompts and seeds, used as
    they are."""

    chat: bool
    body: bytes
    headers: dict[str, str]
    requests: list[Request]
    base_id: str
    created_s: float
    model: str
    kind: StreamKind = "chunks"
    beside: bytes = b""


class StoredDelta(msgspec.Struct, frozen=True, array_like=True):
    """More tokens of one choice, and perhaps its end."""

    index: int
    tokens: list[int]
    logprobs: list[TokenLogprob]
    finish: FinishReason | None


class Ending(msgspec.Struct, frozen=True, omit_defaults=True):
    """End of a stream: cached tokens by choice, any error; for a response its completion (Unix time) and whether it was
    stored."""

    cached_tokens: list[int]
    message: str = ""
    status: int = 0
    type: str = ""
    completed_at: int = 0
    kept: bool = False

    @property
    def error(self) -> RequestError | None:
        return RequestError(self.message, status=self.status, type_=self.type) if self.status else None


class Claim(msgspec.Struct, frozen=True):
    """Stream that a gateway claimed to resume it. `charged`: tokens, prompt and output, that its API key has paid."""

    record: StreamRecord
    stored_deltas: dict[int, Delta]
    ending: Ending | None
    charged: int


def digest_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def encoded(deltas: Sequence[Delta]) -> bytes:
    return _encode([StoredDelta(delta.index, delta.tokens, delta.logprobs, delta.finish) for delta in deltas])


class ResumeStore:
    def __init__(self, path: Path) -> None:
        """Open or create, mode 0600. Raises `ConfigError` for another version, `sqlite3.Error` or `OSError`."""
        private_folder(path.parent)
        # No `gives_back`: its bookkeeping would cost every token's write.
        self._db = opened(path, f"state.folder: {path}", VERSION, _SCHEMA, _UPGRADES, overwrites=True)

    def close(self) -> None:
        self._db.close()

    def add(
        self,
        token: str,
        owner: str,
        holder: str,
        record: StreamRecord,
        *,
        output_bytes: int,
        expires_s: float,
        max_bytes: int,
        max_owner_bytes: int,
        background: bool = False,
    ) -> bool:
        """Add a stream. Return False if it exceeds all streams' or its owner's space."""
        data = _encode(record)
        size = len(data) + output_bytes + ROW_BYTES
        with transaction(self._db):
            used, own = self._db.execute(
                "SELECT coalesce(sum(bytes), 0), coalesce(sum(bytes) FILTER (WHERE owner = ?), 0) FROM streams",
                (owner,),
            ).fetchone()
            if used + size > max_bytes or own + size > max_owner_bytes:
                return False
            self._db.execute(
                "INSERT INTO streams (token, owner, holder, state, expires_s, bytes, record, background) "
                "VALUES (?, ?, ?, 'open', ?, ?, ?, ?)",
                (token, owner, holder, expires_s, size, data, background),
            )
        return True

    def append(self, holder: str, rows: Sequence[tuple[str, bytes]]) -> dict[str, bool]:
        """Append deltas to the holder's open streams. Return those it lost: True to another gateway, False if gone."""
        lost = {}
        with transaction(self._db):
            for token, data in rows:
                written = self._db.execute(
                    "INSERT INTO said (token, data) SELECT token, ? FROM streams "
                    "WHERE token = ? AND holder = ? AND state = 'open'",
                    (data, token, holder),
                )
                if written.rowcount != 1:
                    lost[token] = self._has_other_holder(token, holder)
        return lost

    def _has_other_holder(self, token: str, holder: str) -> bool:
        row = self._db.execute(
            "SELECT 1 FROM streams WHERE token = ? AND holder != ? AND state != 'gone'", (token, holder)
        ).fetchone()
        return row is not None

    def end(self, token: str, holder: str, ending: Ending, expires_s: float) -> bool:
        """Move an open stream to done. Return False if another gateway has it."""
        self._db.execute(
            "UPDATE streams SET state = 'done', ending = ?, expires_s = ? "
            "WHERE token = ? AND holder = ? AND state = 'open'",
            (_encode(ending), expires_s, token, holder),
        )
        return not self._has_other_holder(token, holder)

    def release(self, token: str, holder: str, expires_s: float, charged: int) -> bool:
        """Leave a stream open to the next gateway that claims it. All gateways so far charge `charged` tokens."""
        updated = self._db.execute(
            "UPDATE streams SET holder = '', charged = ?, expires_s = ? "
            "WHERE token = ? AND holder = ? AND state = 'open'",
            (charged, expires_s, token, holder),
        )
        return updated.rowcount == 1 or not self._has_other_holder(token, holder)

    def discard(self, token: str, holder: str, now_s: float) -> bool:
        """Mark a stream as gone. Return False if another gateway has it."""
        with transaction(self._db):
            row = self._db.execute(
                "SELECT 1 FROM streams WHERE token = ? AND holder = ? AND state = 'open'", (token, holder)
            ).fetchone()
            if row is not None:
                self._empty(token, now_s)
        return not self._has_other_holder(token, holder)

    def refresh(self, tokens: Sequence[str], holder: str, expires_s: float, background_s: float) -> None:
        """Extend the expiry of open streams that `holder` generates; of those in the background by another time."""
        with transaction(self._db):
            self._db.executemany(
                "UPDATE streams SET expires_s = iif(background, ?, ?) "
                "WHERE token = ? AND holder = ? AND state = 'open'",
                [(background_s, expires_s, token, holder) for token in tokens],
            )

    def sweep(self, now_s: float) -> None:
        """Drop streams that have expired, and forget those dropped long ago."""
        with transaction(self._db):
            expired = self._db.execute(
                "SELECT token FROM streams WHERE expires_s <= ? AND state != 'gone'", (now_s,)
            ).fetchall()
            for (token,) in expired:
                self._empty(token, now_s)
            self._db.execute("DELETE FROM streams WHERE expires_s <= ? AND state = 'gone'", (now_s,))
            self._db.execute(
                "DELETE FROM streams WHERE token IN (SELECT token FROM streams WHERE state = 'gone' "
                "ORDER BY expires_s DESC LIMIT -1 OFFSET ?)",
                (MAX_GONE,),
            )

    def left(self, until_s: float) -> list[tuple[str, str]]:
        """Return token and owner of open streams in the background without a holder, or whose holder has not extended
        them beyond `until_s`."""
        rows = self._db.execute(
            "SELECT token, owner FROM streams WHERE state = 'open' AND background AND (holder = '' OR expires_s < ?)",
            (until_s,),
        )
        return [(token, owner) for token, owner in rows]

    def record(self, token: str, owner: str) -> StreamRecord | None:
        """Return the request of an owner's open stream, whoever holds it."""
        row = self._db.execute(
            "SELECT record FROM streams WHERE token = ? AND owner = ? AND state = 'open'", (token, owner)
        ).fetchone()
        return None if row is None else _decode_record(row[0])

    def length(self, token: str, owner: str) -> int:
        """Return the bytes that a claim reads; 0 if this owner has no such stream."""
        row = self._db.execute(
            "SELECT coalesce(length(record), 0) + (SELECT coalesce(sum(length(data)), 0) FROM said WHERE token = ?1) "
            "FROM streams WHERE token = ?1 AND owner = ?2",
            (token, owner),
        ).fetchone()
        return 0 if row is None else int(row[0])

    def claim(
        self, token: str, owner: str, holder: str, *, now_s: float, expires_s: float, background_s: float = 0.0
    ) -> Claim | Literal["gone"] | None:
        """Make `holder` the holder of an open stream, and return it. None if this owner has no such stream."""
        with transaction(self._db):
            row = self._db.execute(
                "SELECT state, charged, record, ending, expires_s FROM streams WHERE token = ? AND owner = ?",
                (token, owner),
            ).fetchone()
            if row is None:
                return None
            state, charged, record, ending, until_s = row
            if state == "gone" or until_s <= now_s:
                return "gone"
            if state == "open":
                self._db.execute(
                    "UPDATE streams SET holder = ?, expires_s = iif(background, ?, ?) WHERE token = ?",
                    (holder, background_s, expires_s, token),
                )
            rows = self._db.execute("SELECT data FROM said WHERE token = ? ORDER BY number", (token,)).fetchall()
        deltas: dict[int, Delta] = {}
        for (data,) in rows:
            for each in _decode_deltas(data):
                later = Delta(each.index, each.tokens, each.logprobs, each.finish)
                deltas.setdefault(each.index, Delta(each.index)).merge(later)
        return Claim(_decode_record(record), deltas, None if ending is None else _decode_ending(ending), charged)

    def cancel(self, token: str, owner: str, now_s: float) -> bool:
        """Move a stream to gone for its client. Return False if this owner has none."""
        with transaction(self._db):
            row = self._db.execute(
                "SELECT 1 FROM streams WHERE token = ? AND owner = ? AND state != 'gone'", (token, owner)
            ).fetchone()
            if row is not None:
                self._empty(token, now_s)
        return row is not None

    def _empty(self, token: str, now_s: float) -> None:
        self._db.execute(
            "UPDATE streams SET state = 'gone', holder = '', record = NULL, ending = NULL, bytes = 0, expires_s = ? "
            "WHERE token = ?",
            (now_s + GONE_S, token),
        )
        self._db.execute("DELETE FROM said WHERE token = ?", (token,))


_encode = msgspec.msgpack.Encoder(enc_hook=packed).encode
_decode_record = msgspec.msgpack.Decoder(StreamRecord, dec_hook=unpacked).decode
_decode_deltas = msgspec.msgpack.Decoder(list[StoredDelta]).decode
_decode_ending = msgspec.msgpack.Decoder(Ending).decode
