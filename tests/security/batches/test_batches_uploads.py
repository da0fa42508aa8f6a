"""Attack: uploads that never end, forms of endless fields, downloads whose reader never reads.

Each costs its sender next to nothing and holds memory, a descriptor or a connection of the server's for as long as the
sender likes. Every one must be refused or given up, by a limit that the answer names.
"""

from __future__ import annotations

import asyncio
import gzip
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import aiohttp
import pytest

from tests.services.gateway.batch_client import client_of
from tests.services.gateway.conftest import OpenSite, Site, eventually, model_dir, open_site  # noqa: F401

FORM = {"Content-Type": "multipart/form-data; boundary=b"}
HEADERS = b"".join(b"X-%d: %s\r\n" % (n, b"y" * 6000) for n in range(100))
END = b"\r\n--b--\r\n"


@pytest.fixture
async def plain(open_site: OpenSite) -> AsyncIterator[Site]:  # noqa: F811
    async with open_site() as site:
        yield site


def part(name: str, value: bytes = b"", headers: bytes = b"") -> bytes:
    return b'--b\r\nContent-Disposition: form-data; name="%s"\r\n%s\r\n%s\r\n' % (name.encode(), headers, value)


FILE = b'--b\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n'


async def send(site: Site, pieces: AsyncIterator[bytes], timeout_s: float = 10.0) -> tuple[int, str]:
    """Status and message of a chunked upload."""
    async with asyncio.timeout(timeout_s), site.session.post(site.url + "/v1/files", data=pieces, headers=FORM) as got:
        body = await got.json()
        return got.status, body.get("error", {}).get("message", "")


async def then_silence(*pieces: bytes) -> AsyncIterator[bytes]:
    """A client that waits for ever with the rest."""
    for data in pieces:
        yield data
    await asyncio.sleep(60)


def contents(site: Site) -> list[str]:
    return [path.name for path in (site.batches / "files").iterdir()]


async def test_an_unknown_field_is_refused_before_the_form_ends(plain: Site) -> None:
    status, message = await send(plain, then_silence(part("purpose", b"batch"), part("x" * 3000, b"y" * 900), FILE))
    assert status == 400 and "unknown field" in message and "purpose" in message


@pytest.mark.parametrize(
    "form",
    [
        part("purpose", b"batch") * 2 + FILE + b"x" + END,
        FILE + b"x\r\n" + FILE + b"y" + END,
        part("purpose", b"batch") + part("expires_after[seconds]", b"3600") * 2 + FILE + b"x" + END,
    ],
)
async def test_every_field_is_given_once(plain: Site, form: bytes) -> None:
    async def whole() -> AsyncIterator[bytes]:
        yield form

    status, message = await send(plain, whole())
    assert status == 400 and "twice" in message
    await eventually(lambda: contents(plain) == [])


@pytest.mark.parametrize(
    "pieces",
    [
        [b"preamble\r\n" * 20_000],
        [part("purpose", b"batch", HEADERS)],
        [FILE, b"x" * 100_000, b"\r\n", part("purpose", b"batch", HEADERS)],
    ],
    ids=["before the form", "in headers", "behind the file"],
)
async def test_bytes_beside_the_file_are_bounded_as_they_arrive(plain: Site, pieces: list[bytes]) -> None:
    status, message = await send(plain, then_silence(*pieces))
    assert status == 413 and "65536 bytes beside the file" in message
    await eventually(lambda: contents(plain) == [])


async def test_a_form_may_stop_nowhere(open_site: OpenSite) -> None:  # noqa: F811
    """Not only within the content: before the first boundary, within a header, within a field."""
    async with open_site(limits={"upload_idle_s": 0.2}) as site:
        for pieces in (
            [b""],
            [b"--b\r\nContent-Disp"],
            [b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nba'],
        ):
            status, message = await send(site, then_silence(*pieces))
            assert status == 408 and "arrived in 0.2 s" in message


async def test_a_trickle_is_given_up(open_site: OpenSite) -> None:  # noqa: F811
    """A byte now and then is not progress."""

    async def trickle() -> AsyncIterator[bytes]:
        yield part("purpose", b"batch") + FILE
        for _ in range(100):
            yield b"x"
            await asyncio.sleep(0.05)
        yield END

    async with open_site(limits={"upload_idle_s": 1.0}) as site:
        status, message = await send(site, trickle())
        assert status == 408 and "1024 bytes" in message and "arrived in 1 s" in message
        assert contents(site) == []


async def test_a_slow_client_that_makes_progress_is_served(open_site: OpenSite) -> None:  # noqa: F811
    """Three times the idle time in all, above the least rate throughout."""

    async def slowly() -> AsyncIterator[bytes]:
        yield part("purpose", b"batch") + FILE
        for _ in range(30):
            yield b"x" * 4096
            await asyncio.sleep(0.05)
        yield END

    async with open_site(limits={"upload_idle_s": 0.5}) as site:
        assert (await send(site, slowly()))[0] == 200


async def test_an_upload_has_a_deadline(open_site: OpenSite) -> None:  # noqa: F811
    async def endless() -> AsyncIterator[bytes]:
        yield part("purpose", b"batch") + FILE
        while True:
            yield b"x" * 10_000
            await asyncio.sleep(0.02)

    async with open_site(limits={"upload_whole_s": 0.5}) as site:
        status, message = await send(site, endless())
        assert status == 408 and "more than 0.5 s" in message
        await eventually(lambda: contents(site) == [])


@pytest.mark.parametrize(
    ("body", "status"), [(b" " * 200_000, 413), (gzip.compress(b" " * 20_000_000), 415)], ids=["plain", "compressed"]
)
async def test_the_body_of_a_batch_is_bounded_as_it_arrives(plain: Site, body: bytes, status: int) -> None:
    headers = {"Content-Type": "application/json"}
    if body.startswith(b"\x1f"):
        headers["Content-Encoding"] = "gzip"

    async def rest() -> AsyncIterator[bytes]:
        yield body
        await asyncio.sleep(60)

    async with asyncio.timeout(10), plain.session.post(plain.url + "/v1/batches", data=rest(), headers=headers) as got:
        assert got.status == status


async def test_the_body_of_a_batch_has_a_deadline(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(limits={"upload_idle_s": 0.2}) as site:
        posting = site.session.post(
            site.url + "/v1/batches", data=then_silence(b"{"), headers={"Content-Type": "application/json"}
        )
        async with asyncio.timeout(10), posting as got:
            assert got.status == 408


async def test_a_download_that_is_not_read_is_given_up(open_site: OpenSite) -> None:  # noqa: F811
    """More than the kernel's buffers hold. The reader that comes back late finds the connection cut."""
    data = bytes(24 << 20)
    async with open_site(write_timeout_s=0.5) as site, client_of(site) as client:
        file = await client.files.create(file=data, purpose="batch")
        loop = asyncio.get_running_loop()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            await loop.sock_connect(sock, ("127.0.0.1", site.gateway.port))
            await loop.sock_sendall(
                sock, f"GET /v1/files/{file.id}/content HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode()
            )
            assert (await loop.sock_recv(sock, 15)).startswith(b"HTTP/1.1 200")
            await asyncio.sleep(3.0)
            got = 0
            with suppress(ConnectionResetError):
                async with asyncio.timeout(20):
                    while more := await loop.sock_recv(sock, 1 << 20):
                        got += len(more)
                        if got > len(data):
                            break
        assert got < len(data), "all of it came: the server had waited"
        assert (await client.files.content(file.id)).content == data, "a client that reads gets it whole"


async def test_parallel_uploads_are_bounded(open_site: OpenSite) -> None:  # noqa: F811
    """Over all keys, and for one of several."""
    async with open_site(api_keys=("mine", "yours"), limits={"uploads": 4}) as site:

        async def begin(key: str) -> asyncio.Task[Any]:
            headers = {**FORM, "Authorization": f"Bearer {key}"}
            task = asyncio.create_task(
                site.session.post(site.url + "/v1/files", data=then_silence(FILE, b"x"), headers=headers)
            )
            count = len(contents(site))
            await eventually(lambda: task.done() or len(contents(site)) > count)
            return task

        waiting = [await begin("mine") for _ in range(2)]
        refused = await begin("mine")
        response: aiohttp.ClientResponse = refused.result()
        assert response.status == 429 and "keys.owner_share: 2 files" in await response.text()
        assert response.headers["Retry-After"]
        waiting += [await begin("yours") for _ in range(2)]
        assert not any(task.done() for task in waiting)
        for task in waiting:
            task.cancel()
        await eventually(lambda: contents(site) == [])
        again = await begin("mine")
        assert not again.done(), "those that were cut off count no more"
        again.cancel()
