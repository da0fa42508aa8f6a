"""Attack: a page on another site uses the server of the machine it is viewed on, or reads it under a name of its own.

"Simple" requests that a browser sends without asking, DNS rebinding, frames; and what answers tell strangers: paths and
versions.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from cohort.common.http.browsers import BrowserGuard
from cohort.common.http.static_pages import SHARED
from cohort.services.gateway import front_page
from cohort.services.gateway.front_page import CHAT_PATH
from cohort.services.global_monitor import server as live_page
from cohort.services.global_monitor.aggregate import Cluster
from cohort.services.global_monitor.live import live_state
from cohort.services.global_monitor.live_views import LiveViews
from cohort.services.global_monitor.page import ClusterState
from cohort.services.global_monitor.server import LiveFeed
from cohort.services.global_monitor.window import figures
from tests.services.gateway.conftest import OpenSite, Site, model_dir, open_site, site  # noqa: F401

ASK: dict[str, Any] = {"prompt": "The sea", "max_tokens": 4}
EVIL = "http://evil.example"


async def status(site: Site, method: str, path: str, **headers: str) -> int:  # noqa: F811
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    data = json.dumps(ASK).encode() if method == "POST" else None
    async with site.session.request(method, site.url + path, data=data, headers=named) as response:
        await response.read()
        return response.status


# -- the gateway ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_types_that_a_page_may_send_unasked_are_415(site: Site, content_type: str) -> None:  # noqa: F811
    async with site.session.post(
        site.url + "/v1/completions",
        data=json.dumps(ASK).encode(),
        headers={"Content-Type": content_type} if content_type else {},
        skip_auto_headers=["Content-Type"],
    ) as response:
        assert response.status == 415
        assert "application/json" in (await response.json())["error"]["message"]
    assert not site.manager.submitted


async def test_batches_are_made_of_json_too(site: Site) -> None:  # noqa: F811
    assert await status(site, "POST", "/v1/batches", Content_Type="text/plain") == 415


@pytest.mark.parametrize("content_type", ["application/json", "application/json; charset=utf-8", "Application/JSON"])
async def test_json_is_answered(site: Site, content_type: str) -> None:  # noqa: F811
    assert await status(site, "POST", "/v1/completions", Content_Type=content_type) == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "cross-site", "Origin": EVIL},
        {"Sec_Fetch_Site": "same-site", "Origin": "http://localhost:3000"},
        {"Origin": EVIL},
        {"Origin": "null"},
        {"Origin": "http://["},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate", "Sec_Fetch_Dest": "document"},  # a form's POST
    ],
)
async def test_foreign_pages_are_403(site: Site, headers: dict[str, str]) -> None:  # noqa: F811
    assert await status(site, "POST", "/v1/completions", Content_Type="application/json", **headers) == 403
    assert not site.manager.submitted


async def test_foreign_pages_upload_nothing(site: Site) -> None:  # noqa: F811
    form = aiohttp.FormData()
    form.add_field("purpose", "batch")
    form.add_field("file", b"{}", filename="x.jsonl")
    async with site.session.post(site.url + "/v1/files", data=form, headers={"Origin": EVIL}) as response:
        assert response.status == 403
    assert (await site.get("/v1/files"))[1]["data"] == []


async def test_own_pages_and_programs_pass(site: Site) -> None:  # noqa: F811
    for headers in (
        {"Origin": site.url},
        {"Sec_Fetch_Site": "same-origin", "Origin": "https://behind.a.proxy"},
        {"Sec_Fetch_Site": "none"},
        {},
    ):
        assert await status(site, "POST", "/v1/completions", Content_Type="application/json", **headers) == 200


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/metrics", "/v1/files", "/nothing"])
async def test_names_that_were_rebound_to_this_machine_are_403(site: Site, path: str) -> None:  # noqa: F811
    for host in ("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "1.2.3:80"):
        assert await status(site, "GET", path, Host=host) == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "127.0.0.1:8000", "[::1]:8000", "[::1]", "192.168.1.7:8000", "[fd00::2]:1"]
)
async def test_names_of_this_machine_and_addresses_pass(site: Site, host: str) -> None:  # noqa: F811
    """A page is rebound under a name: one that comes by an address is of another origin."""
    assert await status(site, "GET", "/v1/models", Host=host) == 200


async def test_a_refused_name_says_which_option_adds_it(site: Site) -> None:  # noqa: F811
    async with site.session.get(site.url + "/v1/models", headers={"Host": "gpu.example"}) as response:
        error = (await response.json())["error"]
    assert (error["type"], "gpu.example" in error["message"]) == ("permission_error", True)
    assert "gateway.allowed_hosts" in error["message"]


async def test_allowed_hosts_are_names_and_origins(open_site: OpenSite) -> None:  # noqa: F811
    async with open_site(allowed_hosts=("gpu.example", "chat.example")) as here:
        assert await status(here, "GET", "/v1/models", Host="gpu.example:8000") == 200
        own = {"Content_Type": "application/json", "Sec_Fetch_Site": "cross-site"}
        assert await status(here, "POST", "/v1/completions", Origin="https://chat.example", **own) == 200
        assert await status(here, "POST", "/v1/completions", Origin=EVIL, **own) == 403
        assert await status(here, "GET", "/v1/models", Host="evil.example") == 403


async def test_with_keys_names_are_checked_as_well(open_site: OpenSite) -> None:  # noqa: F811
    """A page has no key, but `/metrics` and `/version` ask for none."""
    async with open_site(api_keys=("k",)) as here:
        for path in ("/metrics", "/version", "/v1/models"):
            assert await status(here, "GET", path, Host="evil.example", Authorization="Bearer k") == 403
        assert await status(here, "GET", "/v1/models", Host="10.1.2.3:8000", Authorization="Bearer k") == 200
        assert await status(here, "GET", "/v1/models", Host="localhost") == 401
    async with open_site(api_keys=("k",), allowed_hosts=("api.example",)) as here:
        assert await status(here, "GET", "/v1/models", Host="api.example", Authorization="Bearer k") == 200


def test_names_beyond_loopback_are_not_known_unless_listed() -> None:
    assert BrowserGuard("0.0.0.0", (), option="o").refusal("GET", {"Host": "gpu.local"}) is None
    listed = BrowserGuard("0.0.0.0", ("gpu.local",), option="o")
    assert listed.refusal("GET", {"Host": "gpu.local:8000"}) is None
    assert listed.refusal("GET", {"Host": "evil.example"}) is not None
    assert listed.refusal("GET", {}) is None  # HTTP/1.0: no browser


# -- what strangers are told ---------------------------------------------------------------------------------------


async def test_the_models_folder_stays_private(site: Site) -> None:  # noqa: F811
    _, body = await site.get("/v1/models")
    assert body["data"][0]["root"] == "tiny"
    for path in ("/v1/models", "/v1/models/tiny", "/version", "/ready", "/metrics", "/v1/models/unknown"):
        async with site.session.get(site.url + path) as response:
            assert "/models" not in (await response.text()).replace("/v1/models", "")


async def test_the_server_header_is_a_name(site: Site) -> None:  # noqa: F811
    for path in ("/health", "/nothing"):
        async with site.session.get(site.url + path) as response:
            assert response.headers["Server"] == "cohort"
    reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port)
    writer.write(b"no HTTP at all\r\n\r\n")
    answer = await reader.read(2000)
    writer.close()
    assert answer.startswith(b"HTTP/1.") and b" 400 " in answer
    assert b"Server: cohort\r\n" in answer and b"aiohttp/" not in answer


# -- the live page -------------------------------------------------------------------------------------------------


class _NoExporter:
    async def expose(self) -> bytes:
        return b"metrics"


@pytest.fixture
async def page() -> AsyncIterator[TestClient[web.Request, web.Application]]:
    def state(_: float) -> ClusterState:
        return ClusterState("n", "m", 0.0, [], [], figures({}, 0.0), {}, 0.0, 0.0, 0.0, 0.0, [], {})

    guard = BrowserGuard("127.0.0.1", (), option="monitor.allowed_hosts")
    looking = LiveViews(Cluster(silence_s=3.0, history_s=9.0), lambda: 0.0, lambda peer, message: None)
    feed = LiveFeed(looking, lambda request_id: live_state(state(0.0), looking, request_id))
    app = live_page.application(
        _NoExporter(),  # type: ignore[arg-type]
        state,
        instance="monitor",
        guard=guard,
        feed=feed,
    )
    async with TestClient(TestServer(app)) as client:
        yield client


LivePage = TestClient[web.Request, web.Application]


@pytest.mark.parametrize("path", ["/", "/api/state", "/metrics", "/health"])
async def test_the_live_page_knows_its_names(page: LivePage, path: str) -> None:
    assert (await page.get(path)).status == 200
    for headers in ({"Host": "evil.example"}, {"Origin": EVIL}, {"Sec-Fetch-Site": "cross-site"}):
        response = await page.get(path, headers=headers)
        assert response.status == 403
        assert "monitor.allowed_hosts" in await response.text()


async def test_a_link_to_the_live_page_works(page: LivePage) -> None:
    follows = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert (await page.get("/", headers=follows)).status == 200
    assert (await page.get("/", headers={**follows, "Sec-Fetch-Dest": "iframe"})).status == 403


async def test_the_live_page_runs_its_own_files_and_nothing_else(page: LivePage) -> None:
    response = await page.get("/")
    _judge_policy(response.headers)
    for path in _named(await response.text()):
        part = await page.get(path)
        assert part.status == 200, path
        assert part.headers["X-Content-Type-Options"] == "nosniff"
    assert (await page.get("/static/main.js")).content_type == "text/javascript"
    for path in ("/static/index.html", "/static/", "/static/..%2Fpage.py", "/static/../page.py", "/static/no.js"):
        assert (await page.get(path)).status == 404, path


async def test_the_chat_is_of_the_gateways_own_origin(open_site: OpenSite) -> None:  # noqa: F811
    """It needs no key itself, and no other origin is let in for it."""
    async with open_site(api_keys=("k",)) as here:
        async with here.session.get(here.url + CHAT_PATH) as response:
            assert response.status == 200
            _judge_policy(response.headers)
            assert not [name for name in response.headers if name.startswith("Access-Control")]
            text = await response.text()
        for path in _named(text):
            assert await status(here, "GET", path) == 200, path
        assert await status(here, "GET", "/v1/models") == 401
        assert await status(here, "GET", CHAT_PATH, Sec_Fetch_Site="cross-site") == 403


async def test_a_copy_that_is_still_good_is_not_sent_again(page: LivePage) -> None:
    first = await page.get("/static/main.js")
    again = await page.get("/static/main.js", headers={"If-None-Match": first.headers["ETag"]})
    assert (again.status, await again.read()) == (304, b"")
    assert again.headers["Content-Security-Policy"] == first.headers["Content-Security-Policy"]


def _judge_policy(headers: Any) -> None:
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
    assert "unsafe" not in headers["Content-Security-Policy"] and "*" not in headers["Content-Security-Policy"]
    assert headers["X-Frame-Options"] == "DENY" and headers["X-Content-Type-Options"] == "nosniff"


def _named(html: str) -> list[str]:
    """The files that a page asks for."""
    found = re.findall(r"<(?:script|link|img)[^>]*\b(?:src|href)=\"([^\"]*)\"", html)
    assert found
    return found


_FOLDERS = (SHARED, Path(live_page.__file__).parent / "static", Path(front_page.__file__).parent / "static")
_FILES = [path for folder in _FOLDERS for path in sorted(folder.iterdir())]


@pytest.mark.parametrize("path", _FILES, ids=lambda path: f"{path.parent.parent.name}/{path.name}")
def test_pages_need_nothing_that_their_policy_forbids(path: Path) -> None:
    """No inline script, style or handler; text reaches the document as text; nothing comes from elsewhere."""
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 500
    assert not re.search(r"<[^>]*\s(style|on\w+)\s*=", text) or path.suffix == ".js"
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style", text)
    assert not re.search(r"setAttribute\(\s*[\"'](style|on)", text)
    words = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|DOMParser|srcdoc|javascript:"
    assert not re.search(words, text)
    assert not re.search(r"(?:import|from|src=|href=|url\()\s*[\"'(]?(?:https?:)?//", text)
