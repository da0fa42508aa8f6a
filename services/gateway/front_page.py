"""`GET /`: a browser is led to a page, a program is told what this is and where everything lies; `GET /chat`: a small
page to try the model with.

A browser on the machine itself goes to the live page of the monitor, which listens on loopback unless configured
otherwise; any other browser, which might not reach that, goes to the API's own pages. Where it is led comes from the
configuration alone, never from what the request says.

The chat page is served by the gateway itself, so that it talks to its own origin: no other origin has to be let in, TLS
and names are those of the API, and keys work as for every client. The page itself needs no key; what it sends to
`/v1/chat/completions` does. Called by aiohttp; decides nothing about requests.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
from aiohttp import web

import cohort
from cohort.common.config import Config
from cohort.common.http.browsers import host_name
from cohort.common.http.exposure import is_loopback
from cohort.common.http.static_pages import page_routes
from cohort.services.gateway.requests.model_card import ModelCard

CHAT_PATH = "/chat"
DOCS_PATH = "/docs"
OPENAPI_PATH = "/openapi.json"
_FOLDER = Path(__file__).parent / "static"


class Front(msgspec.Struct, frozen=True):
    name: str
    version: str
    model: str
    links: dict[str, str]


class FrontPage:
    def __init__(self, config: Config, card: ModelCard) -> None:
        monitor = config.monitor
        self._model = card.name
        # Port 0 is chosen by the launcher, which then says so in the configuration it passes on.
        self._live_page = f"http://{{}}:{monitor.port}/" if monitor.port else ""
        self._live_on_loopback = is_loopback(monitor.host)

    def routes(self) -> list[web.RouteDef]:
        return [web.get("/", self.front)]

    async def front(self, request: web.Request) -> web.Response:
        local = is_loopback(host_name(request.headers.get("Host", "")))
        live = self._live_page.format("127.0.0.1") if self._live_page and local and self._live_on_loopback else ""
        headers = {"Vary": "Accept", "Cache-Control": "no-store"}
        if "text/html" in request.headers.get("Accept", ""):
            return web.Response(status=302, headers={**headers, "Location": live or DOCS_PATH})
        links = {
            "chat": CHAT_PATH,
            "docs": DOCS_PATH,
            "openapi": OPENAPI_PATH,
            "models": "/v1/models",
            "health": "/health",
            "ready": "/ready",
            "metrics": "/metrics",
        }
        if live:
            links["live_page"] = live
        body = msgspec.json.encode(Front("cohort", cohort.__version__, self._model, links))
        return web.Response(body=body, content_type="application/json", headers=headers)


class ChatPage:
    def routes(self) -> list[web.RouteDef]:
        return page_routes(_FOLDER, index_at=CHAT_PATH, files_under=f"{CHAT_PATH}/")
