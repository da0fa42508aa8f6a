"""Files over HTTP: uploads, their limits, and what is left of those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from tests.services.gateway.batch_client import client_of
from tests.services.gateway.conftest import OpenSite, Site, eventually


@pytest.fixture
async def client(site: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(site) as client:
        yield client


def contents(site: Site) -> list[str]:
    """Names in the folder, half-written ones included."""
    return [path.name for path in (site.batches / "files").iterdir()]


async def test_files(client: openai.AsyncOpenAI, site: Site) -> None:
    data = "Köln\n".encode() * 100_000
    file = await client.files.create(file=("ä job.jsonl", data), purpose="batch")
    assert (file.bytes, file.filename, file.purpose, file.object) == (len(data), "ä job.jsonl", "batch", "file")
    assert file.expires_at == file.created_at + 2_592_000
    assert (await client.files.content(file.id)).content == data
    short = await client.files.create(
        file=b"x", purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert short.expires_at == short.created_at + 3600
    assert [found.id async for found in client.files.list(limit=1)] == [short.id, file.id]
    assert [found.id async for found in client.files.list(order="asc", purpose="batch")] == [file.id, short.id]
    assert await client.files.retrieve(file.id) == file
    gone = await client.files.delete(file.id)
    assert (gone.deleted, gone.id, gone.object) == (True, file.id, "file")
    for call in (client.files.retrieve, client.files.delete, client.files.content):
        with pytest.raises(openai.NotFoundError):
            await call(file.id)
    assert file.id not in contents(site)


@pytest.mark.parametrize(
    ("asked", "status", "expected"),
    [
        ("bytes=0-9", 206, slice(0, 10)),
        ("bytes=999990-", 206, slice(999_990, None)),
        ("bytes=-7", 206, slice(-7, None)),
        ("bytes=5-99999999", 206, slice(5, None)),
        ("bytes=1000000-", 416, None),
        ("bytes=9-5", 416, None),
        ("nonsense", 416, None),
    ],
)
async def test_parts_of_a_file(
    client: openai.AsyncOpenAI, site: Site, asked: str, status: int, expected: slice | None
) -> None:
    data = bytes(range(250)) * 4000
    file = await client.files.create(file=data, purpose="batch")
    url = f"{site.url}/v1/files/{file.id}/content"
    async with site.session.get(url, headers={"Range": asked}) as response:
        assert response.status == status
        if expected is not None:
            part = await response.read()
            assert part == data[expected]
            begin = expected.indices(len(data))[0]
            assert response.headers["Content-Range"] == f"bytes {begin}-{begin + len(part) - 1}/{len(data)}"


async def test_the_head_of_a_download(client: openai.AsyncOpenAI, site: Site) -> None:
    for data in (b"", b"x" * 300_000):
        file = await client.files.create(file=("a b.jsonl", data), purpose="batch")
        url = f"{site.url}/v1/files/{file.id}/content"
        for method in ("HEAD", "GET"):
            async with site.session.request(method, url, headers={"x-request-id": "mine"}) as response:
                assert (response.status, response.headers["Content-Length"]) == (200, str(len(data)))
                assert response.headers["x-request-id"] == "mine"
                assert response.headers["Content-Disposition"] == 'attachment; filename="a b.jsonl"'
                assert await response.read() == (data if method == "GET" else b"")


async def test_uploads_cut_off_leave_nothing(open_site: OpenSite, tmp_path: Path) -> None:
    folder = tmp_path / "batches" / "0" / "files"
    async with open_site() as site, client_of(site) as client:
        kept = (await client.files.create(file=b"x", purpose="batch")).id
        await client.files.delete((await client.files.create(file=b"y", purpose="batch")).id)
    (folder / f"file-{1:024x}.part").write_bytes(b"half")
    (folder / f"file-{2:024x}").write_bytes(b"whole, but its row was never written")
    async with open_site() as site:
        assert contents(site) == [kept]
        (folder / kept).unlink()
        form = aiohttp.FormData()

        async def slowly() -> AsyncIterator[bytes]:
            yield b"x" * 3_000_000
            await asyncio.sleep(60)

        form.add_field("purpose", "batch")
        form.add_field("file", slowly(), filename="f")
        posting = asyncio.create_task(site.session.post(site.url + "/v1/files", data=form))
        await eventually(lambda: any(folder.iterdir()))
        posting.cancel()
        with suppress(asyncio.CancelledError):
            await posting
        await eventually(lambda: not list(folder.iterdir()))


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_file_too_large_is_413(open_site: OpenSite, streamed: bool) -> None:
    """By its announced length at once, else when the limit is passed."""
    async with open_site(limits={"file_bytes": 3_000_000}) as site:

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(40):
                yield b"x" * 100_000

        form = aiohttp.FormData()
        form.add_field("purpose", "batch")
        form.add_field("file", pieces() if streamed else b"x" * 4_000_000, filename="f")
        with suppress(aiohttp.ClientOSError):  # the server closes while we still send: the answer may be lost
            async with site.session.post(site.url + "/v1/files", data=form) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (413, "413")
        status, body = await site.get("/v1/files")
        assert (status, body["data"]) == (200, [])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"file": b"x"}, "purpose"),
        ({"purpose": "batch"}, "file"),
        ({"purpose": "fine-tune", "file": b"x"}, "purpose"),
        ({"purpose": "batch", "file": b"x", "more": "1"}, "more"),
        ({"purpose": "batch", "file": b"x", "expires_after[seconds]": "5000"}, "expires_after"),
        (
            {"purpose": "batch", "file": b"x", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"},
            "expires_after",
        ),
        (
            {"purpose": "batch", "file": b"x", "expires_after[anchor]": "created_at", "expires_after[seconds]": "many"},
            "expires_after",
        ),
        ({"purpose": "x" * 2000, "file": b"x"}, "purpose"),
    ],
)
async def test_bad_uploads_are_400(site: Site, fields: dict[str, Any], param: str) -> None:
    form = aiohttp.FormData(default_to_multipart=True)
    for name, value in fields.items():
        form.add_field(name, value, filename="f" if name == "file" else None)
    async with site.session.post(site.url + "/v1/files", data=form) as response:
        assert (response.status, (await response.json())["error"]["param"]) == (400, param)
    assert contents(site) == []


@pytest.mark.parametrize(
    ("content_type", "body"),
    [
        ("application/json", b"{}"),
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b"no form"),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\nhalf'),
        ("multipart/form-data; boundary=b", b"--b\r\n\r\nx\r\n--b--\r\n"),
    ],
)
async def test_bodies_that_are_no_form_are_400(site: Site, content_type: str, body: bytes) -> None:
    async with site.session.post(site.url + "/v1/files", data=body, headers={"Content-Type": content_type}) as response:
        assert response.status == 400, await response.text()
