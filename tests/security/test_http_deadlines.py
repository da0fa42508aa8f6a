"""Attack: connections that cost the client nothing and the gateway memory or a descriptor for ever.

Bodies that never end, come byte by byte or grow a thousandfold when decompressed; answers that nobody reads; heads that
are never complete; more connections than the process may open.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from structlog import get_logger

from cohort.common.clock import SystemClock
from cohort.common.http.http_server import AcceptingSite, raise_descriptor_limit
from cohort.services.gateway import service
from tests.security.conftest import counted
from tests.services.gateway.conftest import OpenSite, Site, eventually, model_dir, open_site  # noqa: F401

JSON = "Content-Type: application/json"
BODY = b'{"prompt": "x", "max_tokens": 4}'
CHOICES = 70
MANY = b'{"prompt": "x", "max_tokens": 400, "n": %d, "ignore_eos": true, "logprobs": 20}' % CHOICES
"""Answered with more bytes than kernel buffers hold."""
READ_BYTES = 200_000
PATIENCE_S = 8.0


def head(length: int | str, *more: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: localhost", JSON, f"Content-Length: {length}", *more, "", ""]
    return "\r\n".join(lines).encode()


@asynccontextmanager
async def connected(site: Site) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def status_of(reader: asyncio.StreamReader) -> int:
    async with asyncio.timeout(PATIENCE_S):
        return int((await reader.readline()).split()[1])


# -- bodies --------------------------------------------------------------------------------------------------------


async def test_a_body_that_stands_still_is_given_up(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(limits={"body_idle_s": 0.3}) as site, connected(site) as (reader, writer):
        writer.write(head(100) + b'{"pro')
        assert await status_of(reader) == 408
        assert b"has not moved for 0.3 seconds" in await reader.read(2000)


async def test_a_body_that_drips_is_given_up(open_site: OpenSite) -> None:  # noqa: F811
    limits = {"body_idle_s": 5.0, "body_whole_s": 0.6}
    async with open_site(limits=limits) as site, connected(site) as (reader, writer):

        async def drip() -> None:
            writer.write(head(10_000))
            while True:
                writer.write(b" ")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        assert await status_of(reader) == 408
        assert b"is not complete after 0.6 seconds" in await reader.read(2000)
        dripping.cancel()


async def test_a_body_in_pieces_is_read(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(limits={"body_idle_s": 2.0}) as site, connected(site) as (reader, writer):
        writer.write(head(len(BODY)))
        for index in range(len(BODY)):
            writer.write(BODY[index : index + 1])
            await asyncio.sleep(0.005)
        assert await status_of(reader) == 200


async def test_compressed_bodies_are_refused_before_they_grow(open_site: OpenSite) -> None:  # noqa: F811
    bomb = gzip.compress(b" " * (20 << 20))
    async with open_site() as site, connected(site) as (reader, writer):
        writer.write(head(len(bomb), "Content-Encoding: gzip") + bomb[:1000])
        assert await status_of(reader) == 415
        with contextlib.suppress(ConnectionError):
            writer.write(bomb[1000:])
            await writer.drain()
        assert (await site.get("/health"))[0] == 200


async def test_bodies_in_flight_share_a_budget(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(max_body_bytes=5000, limits={"bodies": 1, "body_idle_s": PATIENCE_S}) as site:
        bodies = site.gateway.generator.bodies
        async with connected(site) as (_, first), connected(site) as (reader, second):
            first.write(head(3500) + b" " * 3000)
            await eventually(lambda: bodies.in_flight_bytes == 3000)
            second.write(head(3500) + b" " * 3000)
            assert await status_of(reader) == 429
            answer = await reader.read(2000)
            assert b"Retry-After: 1" in answer and "of 5000 (1 × gateway.max_body_bytes)".encode() in answer
            assert bodies.in_flight_bytes == 3000
        await eventually(lambda: bodies.in_flight_bytes == 0)
        assert (await site.post("/v1/completions", {"prompt": "x", "max_tokens": 4}))[0] == 200
        assert bodies.in_flight_bytes == 0


@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_a_body_too_large_names_its_limit(open_site: OpenSite, framing: str) -> None:  # noqa: F811
    async with open_site(max_body_bytes=1000) as site:
        data = b" " * 2000
        body = data if framing == "length" else _chunks(data)
        headers = {"Content-Type": "application/json"}
        async with site.session.post(site.url + "/v1/completions", data=body, headers=headers) as response:
            message = (await response.json())["error"]["message"]
            assert (response.status, "1000 bytes (gateway.max_body_bytes)" in message) == (413, True)


async def _chunks(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_a_head_that_is_never_complete_is_closed(
    open_site: OpenSite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "KEEP_ALIVE_S", 0.4)
    async with open_site() as site, connected(site) as (reader, writer):

        async def drip() -> None:
            writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
            while True:
                writer.write(b"X-A: b\r\n")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
        dripping.cancel()


# -- answers -------------------------------------------------------------------------------------------------------


LARGE: dict[str, int] = {"max_request_work": 1 << 26, "max_open_work": 1 << 26}
"""The answers here are larger than a request may ask for by default."""


@contextlib.contextmanager
def slow_socket() -> Iterator[socket.socket]:
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        raw.setblocking(False)
        yield raw


async def ask_for_much(site: Site, raw: socket.socket) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_connect(raw, ("127.0.0.1", site.gateway.port))
    await loop.sock_sendall(raw, head(len(MANY)) + MANY)
    await eventually(lambda: len(site.manager.submitted) == CHOICES, 120)
    await eventually(site.nothing_left, 120)


async def read_all(raw: socket.socket, pause_s: float = 0.0) -> tuple[bytes, bool]:
    """What came, and whether all of it came."""
    loop, received = asyncio.get_running_loop(), bytearray()
    async with asyncio.timeout(120):
        try:
            while True:
                chunk = await loop.sock_recv(raw, READ_BYTES)
                received += chunk
                top, _, body = bytes(received[:4096]).partition(b"\r\n\r\n")
                length = next((line for line in top.split(b"\r\n") if line.lower().startswith(b"content-length")), b"")
                if body and length and len(received) == len(top) + 4 + int(length.split(b":")[1]):
                    return bytes(received), True
                if not chunk:
                    break
                await asyncio.sleep(pause_s)
        except ConnectionError:
            pass
    return bytes(received), False


async def test_a_whole_answer_left_unread_is_given_up(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(lambda request: [9] * 400, **LARGE, write_timeout_s=0.4) as site:
        with slow_socket() as raw:
            await ask_for_much(site, raw)
            await eventually(lambda: counted(site, "cohort_clients_given_up_total") == 1, PATIENCE_S)
            assert not (await read_all(raw))[1]
        assert counted(site, "cohort_clients_given_up_total") == 1


async def test_an_answer_that_is_read_slowly_arrives(open_site: OpenSite) -> None:  # noqa: F811
    """For several times as long as it may stand still, and so slowly that the gateway's kernel, which takes more only
    when a third of its buffer is free, takes nothing for longer than that."""
    async with open_site(lambda request: [9] * 400, **LARGE, write_timeout_s=0.5) as site:
        with slow_socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 18)
            await ask_for_much(site, raw)
            received, complete = await read_all(raw, pause_s=0.1)
            assert complete and len(received) > 30 * READ_BYTES  # as many pauses, at least
        assert counted(site, "cohort_clients_given_up_total") == 0


async def test_a_byte_now_and_then_keeps_nothing_open(
    open_site: OpenSite,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer that moves, but would take longer than a request may live.

    It cannot have stood still for `write_timeout_s` when it is given up. The clock of the request, which must not run
    out while the answer is computed, stands still; that of the connection is the loop's.
    """
    monkeypatch.setattr(SystemClock, "now_s", lambda _: 1000.0)
    async with open_site(lambda request: [9] * 400, **LARGE, write_timeout_s=30.0, request_timeout_s=2.0) as site:
        with slow_socket() as raw:
            await ask_for_much(site, raw)
            begun_s = asyncio.get_running_loop().time()
            received, complete = await read_all(raw, pause_s=0.1)
            assert received.startswith(b"HTTP/1.1 200") and not complete
            assert asyncio.get_running_loop().time() - begun_s < 20.0
        assert counted(site, "cohort_clients_given_up_total") == 1


# -- connections ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def no_descriptors_left() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    filling: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                filling.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in filling:
            os.close(descriptor)


async def test_connections_that_cannot_be_accepted_are_counted_and_come_in_later(
    open_site: OpenSite,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    async with open_site() as site:
        client = socket.socket()
        client.setblocking(False)
        with no_descriptors_left():
            await asyncio.get_running_loop().sock_connect(client, ("127.0.0.1", site.gateway.port))
            await asyncio.sleep(0.3)
        await asyncio.get_running_loop().sock_sendall(client, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert (await asyncio.get_running_loop().sock_recv(client, 100)).startswith(b"HTTP/1.1 200")
        client.close()
        printed = capsys.readouterr().err
        assert "connections cannot be accepted" in printed and "Too many open files" in printed
        assert counted(site, "cohort_accepts_failed_total") >= 1


async def test_every_address_of_a_name_is_listened_on() -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.Response(text="here")

    app = web.Application()
    app.add_routes([web.get("/", answer)])
    runner = web.AppRunner(app)
    await runner.setup()
    failures: list[None] = []
    site = AcceptingSite(runner, "localhost", 0, backlog=8, failed=lambda: failures.append(None), log=get_logger())
    await site.start()
    try:
        for host, port in site.addresses:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            assert (await reader.read()).endswith(b"here")
            writer.close()
        assert site.name == f"http://localhost:{site.addresses[0][1]}" and not failures
    finally:
        await runner.cleanup()
    assert not site.addresses


def test_the_soft_descriptor_limit_becomes_the_hard_one() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(name) for name in os.listdir("/proc/self/fd"))
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
        assert raise_descriptor_limit() == (highest + 10, hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
