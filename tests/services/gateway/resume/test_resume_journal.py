"""Deltas on their way to the database, and what becomes of them while the disk refuses."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from cohort.services.gateway.generation.delta import Delta
from cohort.services.gateway.resume import resume_journal
from cohort.services.gateway.resume.resume_journal import Journal
from cohort.services.gateway.resume.resume_session import ResumeLog


class Disk:
    """A store that refuses while it is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.full = False
        self.tokens: list[int] = []
        self.encoded = 0
        self.journal = Journal(tmp_path / "streams", "me", lambda *_: None, structlog.get_logger())
        encoded = resume_journal.encoded

        def counted(deltas: Sequence[Delta]) -> bytes:
            self.encoded += len(deltas)
            return encoded(deltas)

        async def run(work: Any) -> Any:
            await asyncio.sleep(0)
            return work(self)

        monkeypatch.setattr(resume_journal, "encoded", counted)
        monkeypatch.setattr(self.journal, "run", run)

    def append(self, holder: str, rows: Sequence[tuple[str, bytes]]) -> dict[str, bool]:
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        for _, data in rows:
            self.tokens += [token for delta in msgspec.msgpack.decode(data) for token in delta[1]]
        return {}


async def feed(disk: Disk, log: ResumeLog, tokens: range) -> None:
    for token in tokens:
        log.put_tokens(0, [token])
        disk.journal.schedule("d", log)
        if (writing := disk.journal._writing) is not None:
            await writing


async def test_work_on_a_full_disk_is_in_proportion_to_the_stream(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    spent: list[int] = []
    for count in (500, 1000):
        with monkeypatch.context() as patch:
            disk, log = Disk(patch, tmp_path), ResumeLog()
            disk.full = True
            await feed(disk, log, range(count))
            assert log.deltas[0].tokens == list(range(count))  # its reader has seen them
            spent.append(disk.encoded)
    assert spent[1] <= 2.5 * spent[0] <= 2.5 * 8 * 500


@pytest.mark.parametrize("refused", [1, 3, 40])
async def test_what_was_refused_is_written_first_and_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refused: int
) -> None:
    disk, log = Disk(monkeypatch, tmp_path), ResumeLog()
    await feed(disk, log, range(5))
    disk.full = True
    await feed(disk, log, range(5, 5 + refused))
    assert disk.tokens == [*range(5)]
    disk.full = False
    await feed(disk, log, range(5 + refused, 6 + refused))
    await disk.journal.flush("d")
    await feed(disk, log, range(6 + refused, 8 + refused))
    assert disk.tokens == log.deltas[0].tokens == [*range(8 + refused)]
