"""The gateway over TLS: who gets in, by which version, and that a renewed certificate needs no restart."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cohort.common.config import Config, GatewayConfig
from cohort.common.errors import ConfigError
from cohort.services.launcher import preflight
from cohort.services.launcher.options import add_arguments, overrides_of
from cohort.services.launcher.plan import plan
from cohort.services.launcher.processes.probe import answers_ok
from tests.certificates import make_certificate
from tests.examples import examples, run_in_thread
from tests.services.gateway.conftest import OpenSite


def trusting(cert: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(cert))


async def test_clients_come_by_https_and_a_renewal_needs_no_restart(open_site: OpenSite, tmp_path: Path) -> None:
    cert = make_certificate(tmp_path)
    key = cert.with_suffix(".key")
    trusted = trusting(cert)
    async with open_site(wait_ready=False, tls_cert=str(cert), tls_key=str(key)) as site:
        url = f"https://localhost:{site.gateway.port}"
        assert site.context.metrics_url == f"https://127.0.0.1:{site.gateway.port}/metrics"
        async with asyncio.timeout(10):
            while not await answers_ok(f"{url}/ready", 2.0):  # noqa: ASYNC110 -- as the launcher asks
                await asyncio.sleep(0.01)
        body = {"model": "tiny", "prompt": "the quick", "max_tokens": 4}
        async with site.session.post(f"{url}/v1/completions", json=body, ssl=trusted) as response:
            assert response.status == 200 and (await response.json())["choices"][0]["text"]
        async with site.session.post(f"{url}/v1/completions", json={**body, "stream": True}, ssl=trusted) as response:
            assert (await response.read()).endswith(b"data: [DONE]\n\n")
        async with site.session.get(f"{url}/metrics", ssl=trusted) as response:
            assert "cohort_tls_certificate_expires_seconds{" in await response.text()
        with pytest.raises(aiohttp.ClientError):
            await site.session.get(f"http://localhost:{site.gateway.port}/health")
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await site.session.get(f"{url}/health")

        renewed = make_certificate(tmp_path, "renewed")
        renewed.with_suffix(".key").replace(key)
        renewed.replace(cert)
        assert site.gateway._tls is not None and site.gateway._tls.reload_if_changed()
        async with aiohttp.ClientSession() as fresh:
            async with fresh.get(f"{url}/health", ssl=trusting(cert)) as response:
                assert response.status == 200
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await fresh.get(f"{url}/health", ssl=trusted)
        async with site.session.get(f"{url}/health", ssl=trusted) as response:
            assert response.status == 200, "connections that were open stay"


async def test_old_versions_of_tls_are_refused(open_site: OpenSite, tmp_path: Path) -> None:
    cert = make_certificate(tmp_path)
    async with open_site(wait_ready=False, tls_cert=str(cert), tls_key=str(cert.with_suffix(".key"))) as site:
        for version, served in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
            client = trusting(cert)
            client.set_ciphers("ALL:@SECLEVEL=0")  # else the client's own library refuses before it asks
            client.minimum_version = client.maximum_version = version
            try:
                async with site.session.get(f"https://localhost:{site.gateway.port}/health", ssl=client) as response:
                    assert response.status == 200 and served
            except aiohttp.ClientError:
                assert not served


async def test_a_client_that_never_shakes_hands_does_not_keep_the_gateway(open_site: OpenSite, tmp_path: Path) -> None:
    cert = make_certificate(tmp_path)
    async with open_site(wait_ready=False, tls_cert=str(cert), tls_key=str(cert.with_suffix(".key"))) as site:
        _, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
        async with site.session.get(f"https://localhost:{site.gateway.port}/health", ssl=trusting(cert)) as response:
            assert response.status == 200
    writer.close()  # the site has ended by now, within its own deadline of ten seconds


def _client_hello() -> bytes:
    outgoing = ssl.MemoryBIO()
    with suppress(ssl.SSLWantReadError):
        ssl.create_default_context().wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost").do_handshake()
    return outgoing.read()


async def _shake_hands(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, trusted: ssl.SSLContext) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusted.wrap_bio(incoming, outgoing, server_hostname="localhost")
    while True:
        try:
            client.do_handshake()
        except ssl.SSLWantReadError:
            writer.write(outgoing.read())
            incoming.write(await reader.read(65_536))
        else:
            writer.write(outgoing.read())
            return


EDITS = st.lists(st.tuples(st.integers(0, 2000), st.binary(min_size=1, max_size=9)), max_size=6)


async def test_records_of_any_bytes_end_their_own_connection(open_site: OpenSite, tmp_path: Path) -> None:
    """In place of a client's first message, changed or cut off, or after a whole handshake: other clients go on."""
    cert, loop, hello, unhandled = (
        make_certificate(tmp_path),
        asyncio.get_running_loop(),
        _client_hello(),
        list[object](),
    )
    loop.set_exception_handler(lambda _, context: unhandled.append(context))
    trusted = trusting(cert)

    async def attack(port: int, edits: list[tuple[int, bytes]], cut: int, tail: bytes, shakes_hands: bool) -> None:
        data = bytearray(hello)
        for place, value in edits:
            data[place % len(data) : place % len(data) + len(value)] = value
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            if shakes_hands:
                await _shake_hands(reader, writer, trusted)
            with suppress(OSError):
                writer.write(bytes(data[: len(data) - cut % len(data)]) + tail)
                await writer.drain()
                await asyncio.wait_for(reader.read(65_536), 0.05)
        except TimeoutError:
            pass  # it waits for the rest
        finally:
            writer.close()

    async with open_site(wait_ready=False, tls_cert=str(cert), tls_key=str(cert.with_suffix(".key"))) as site:

        @settings(max_examples=examples(1.0), deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(EDITS, st.just(0) | st.integers(0, 2000), st.binary(max_size=200), st.booleans())
        def run(edits: list[tuple[int, bytes]], cut: int, tail: bytes, shakes_hands: bool) -> None:
            attacked = attack(site.gateway.port, edits, cut, tail, shakes_hands)
            asyncio.run_coroutine_threadsafe(attacked, loop).result(60)

        await run_in_thread(run)
        async with site.session.get(f"https://localhost:{site.gateway.port}/health", ssl=trusted) as response:
            assert response.status == 200
    assert unhandled == []


def test_the_launcher_takes_both_files_and_refuses_what_the_gateway_would(tmp_path: Path) -> None:
    import argparse

    parser = argparse.ArgumentParser()
    add_arguments(parser)
    options = parser.parse_args(["--tls-cert", "a.pem", "--tls-key", "/b.key"])
    assert overrides_of(options, set()) == {"gateway": {"tls_cert": str(Path.cwd() / "a.pem"), "tls_key": "/b.key"}}
    config = Config(gateway=GatewayConfig(tls_cert=str(tmp_path / "a.pem"), tls_key=str(tmp_path / "a.key")))
    with pytest.raises(ConfigError, match=r"gateway\.tls_cert: .*a\.pem cannot be read"):
        preflight.check_certificate(config)
    preflight.check_certificate(Config())
    gateway, predictor = plan(config)[:2]
    assert gateway.ready_url.startswith("https://") and predictor.ready_url.startswith("http://")
