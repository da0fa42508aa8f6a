"""Attack: fill the disk of all with the files and results of one.

Uploads that each see what was stored before the others began; results, which lie in the database and again in the
output file, past any limit; files without number; one key that takes what all keys share; a database that stays as
large as it ever was.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from cohort.services.gateway.batches import batch_runner
from tests.services.gateway.batch_client import ask, begin, client_of, ended, job, until
from tests.services.gateway.conftest import OpenSite, Site, eventually, model_dir, open_site  # noqa: F401

VERSION_1 = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value INTEGER NOT NULL) STRICT;
CREATE TABLE files (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    purpose TEXT NOT NULL, filename TEXT NOT NULL, bytes INTEGER NOT NULL, created_at INTEGER NOT NULL,
    expires_at INTEGER NOT NULL) STRICT;
CREATE INDEX files_by_expiry ON files (expires_at);
CREATE TABLE batches (seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL,
    status TEXT NOT NULL, endpoint TEXT NOT NULL, input_file_id TEXT NOT NULL, completion_window TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL, output_retention_s INTEGER NOT NULL, metadata TEXT,
    model TEXT, errors TEXT, in_progress_at INTEGER, finalizing_at INTEGER, completed_at INTEGER, failed_at INTEGER,
    expired_at INTEGER, cancelling_at INTEGER, cancelled_at INTEGER, output_file_id TEXT, error_file_id TEXT,
    total INTEGER NOT NULL DEFAULT 0, completed INTEGER NOT NULL DEFAULT 0, failed INTEGER NOT NULL DEFAULT 0,
    input_tokens INTEGER NOT NULL DEFAULT 0, cached_tokens INTEGER NOT NULL DEFAULT 0,
    output_tokens INTEGER NOT NULL DEFAULT 0) STRICT;
CREATE INDEX batches_by_status ON batches (status);
CREATE TABLE lines (batch_id TEXT NOT NULL REFERENCES batches (id) ON DELETE CASCADE, number INTEGER NOT NULL,
    start INTEGER NOT NULL, length INTEGER NOT NULL, custom_id TEXT NOT NULL, succeeded INTEGER, result BLOB,
    PRIMARY KEY (batch_id, number)) STRICT;
CREATE INDEX lines_pending ON lines (batch_id, number) WHERE result IS NULL;
INSERT INTO meta VALUES ('schema_version', 1);
"""


async def post(site: Site, content: AsyncIterator[bytes], key: str = "none") -> tuple[int, Any]:
    import aiohttp

    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", content, filename="f")
    headers = {"Authorization": f"Bearer {key}"}
    async with site.session.post(site.url + "/v1/files", data=form, headers=headers) as response:
        return response.status, await response.json()


async def test_parallel_uploads_cannot_exceed_the_storage_together(open_site: OpenSite) -> None:  # noqa: F811
    """One upload begins, another one comes and is stored, the first goes on with what the second has taken."""
    async with open_site(batch={"storage_bytes": 4_000_000}) as site, client_of(site) as client:
        stored = asyncio.Event()
        begun = asyncio.Event()

        async def content() -> AsyncIterator[bytes]:
            yield bytes(1_500_000)
            begun.set()
            await stored.wait()
            yield bytes(1_500_000)

        first = asyncio.create_task(post(site, content()))
        await begun.wait()
        await asyncio.sleep(0.2)
        await client.files.create(file=bytes(2_000_000), purpose="batch")
        stored.set()
        status, body = await first
        assert status == 507 and "batch.storage_bytes" in body["error"]["message"]
        assert sum([file.bytes async for file in client.files.list()]) == 2_000_000
        status, _ = await post(site, one(bytes(1_900_000)))
        assert status == 200, "what the refused one had reserved is free again"


async def one(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_a_file_that_says_it_is_too_large_is_refused_before_it_comes(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(batch={"storage_bytes": 100_000}) as site, client_of(site) as client:
        with pytest.raises(openai.APIStatusError, match=r"batch\.storage_bytes") as refused:
            await client.files.create(file=bytes(400_000), purpose="batch")
        assert refused.value.status_code == 507


async def test_files_are_counted(open_site: OpenSite) -> None:  # noqa: F811
    """Of each key: the other one has its own."""
    options = {"api_keys": ("mine", "yours"), "limits": {"files": 3}}
    async with open_site(**options) as site, client_of(site, "mine") as me, client_of(site, "yours") as you:
        files = [await me.files.create(file=b"", purpose="batch") for _ in range(3)]
        with pytest.raises(openai.APIStatusError, match="You have 3 files") as refused:
            await me.files.create(file=b"", purpose="batch")
        assert refused.value.status_code == 507
        await you.files.create(file=b"", purpose="batch")
        await me.files.delete(files[0].id)
        await me.files.create(file=b"", purpose="batch")


@pytest.mark.parametrize(("keys", "own"), [(("mine", "yours"), 50_000), (("mine",), 100_000), ((), 100_000)])
async def test_one_key_of_several_fills_its_share(open_site: OpenSite, keys: tuple[str, ...], own: int) -> None:  # noqa: F811
    async with open_site(api_keys=keys, batch={"storage_bytes": 100_000}) as site:
        assert (await post(site, one(bytes(own)), "mine"))[0] == 200
        status, body = await post(site, one(b"x"), "mine")
        assert status == 507 and str(own) in body["error"]["message"]
        if "yours" in keys:
            assert "keys.owner_share" in body["error"]["message"]
            assert (await post(site, one(bytes(50_000)), "yours"))[0] == 200


def waits_for_storage(site: Site) -> bool:
    """The next line does, and none is in work."""
    samples = [sample for family in site.context.registry.collect() for sample in family.samples]
    waits = any(sample.name == "cohort_batch_line_retries_total" and sample.value for sample in samples)
    return waits and all(not sample.value for sample in samples if sample.name == "cohort_batch_lines_in_work")


async def test_no_line_starts_when_results_fill_the_storage(
    open_site: OpenSite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is stored stays below the limit, the written output included; the lines go on when there is space again."""
    monkeypatch.setattr(batch_runner, "STORAGE_WAIT_S", 0.02, raising=False)
    limit, filler = 150_000, 100_000
    async with open_site(batch={"storage_bytes": limit, "concurrency": 1}) as site, client_of(site) as client:
        file = await client.files.create(file=bytes(filler), purpose="batch")
        batch = await begin(client, job(*[ask(str(n)) for n in range(40)]))
        batch = await until(client, batch, lambda now: bool(now.request_counts and now.request_counts.completed > 5))
        await eventually(lambda: waits_for_storage(site), 20.0)
        before = (await client.batches.retrieve(batch.id)).request_counts
        await asyncio.sleep(0.3)
        stuck = await client.batches.retrieve(batch.id)
        assert (stuck.status, stuck.request_counts) == ("in_progress", before) and before and before.completed < 40
        with pytest.raises(openai.APIStatusError, match=r"batch\.storage_bytes"):
            await client.batches.create(
                input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
            )
        await client.files.delete(file.id)
        batch = await ended(client, batch, 20.0)
        assert batch.status == "completed" and batch.request_counts and batch.request_counts.completed == 40
        assert sum([found.bytes async for found in client.files.list()]) < limit


async def test_a_batch_without_storage_can_be_cancelled(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(batch={"storage_bytes": 40_000, "concurrency": 1}) as site, client_of(site) as client:
        batch = await begin(client, job(*[ask(str(n)) for n in range(60)]))
        await until(client, batch, lambda now: now.status == "in_progress")
        await asyncio.sleep(0.5)
        await client.batches.cancel(batch.id)
        assert (await ended(client, batch, 10.0)).status == "cancelled"
        assert len(site.manager.submitted) < 60


async def test_ended_batches_do_not_add_up(open_site: OpenSite) -> None:  # noqa: F811
    """A failed batch keeps a hundred errors; each key keeps its latest batches, and those that have not ended."""
    slow = open_site(step_s=0.05, api_keys=("mine", "yours"), limits={"batches": 3})
    async with slow as site, client_of(site, "mine") as me, client_of(site, "yours") as you:
        running = await begin(me, job(ask()))
        yours = await begin(you, b"?\n" * 100)
        made = [await ended(me, await begin(me, b"?\n" * 100)) for _ in range(6)]
        found = [batch.id async for batch in me.batches.list()]
        assert found[:3] == [batch.id for batch in reversed(made[3:])]
        assert set(found[3:]) <= {running.id}
        assert [batch.id async for batch in you.batches.list()] == [yours.id]


async def test_the_database_gives_back_the_space_of_batches(open_site: OpenSite, tmp_path: Path) -> None:  # noqa: F811
    """Also one of an earlier version, which could not."""
    folder = tmp_path / "batches" / "0"
    folder.mkdir(mode=0o700, parents=True)
    with sqlite3.connect(folder / "batches.sqlite") as db:
        db.executescript(VERSION_1)
    db.close()
    async with open_site() as site, client_of(site) as client:
        await ended(client, await begin(client, job(*[ask(str(n)) for n in range(300)])))
        database = folder / "batches.sqlite"

        log = database.with_name(database.name + "-wal")
        await eventually(lambda: database.stat().st_size < 100_000 and log.stat().st_size == 0)
    with sqlite3.connect(database) as db:
        assert db.execute("PRAGMA freelist_count").fetchone()[0] < 10
        assert db.execute("SELECT value FROM meta WHERE name = 'schema_version'").fetchone()[0] == 2
    db.close()
