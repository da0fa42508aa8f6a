"""The gateway over TLS: who gets in, by which version, and that a renewed certificate needs no restart."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import aiohttp
import pytest

from cohort.common.config import Config, GatewayConfig
from cohort.common.errors import ConfigError
from cohort.services.launcher import preflight
from cohort.services.launcher.options import add_arguments, overrides_of
from cohort.services.launcher.plan import plan
from cohort.services.launcher.processes.probe import answers_ok
from tests.certificates import make_certificate
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
