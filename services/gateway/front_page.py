"""`GET /`: leads a browser to a page, describes the service to a program; `GET /chat`: a page to try the model.

A browser on this machine goes to the monitor's live page, which listens on loopback by default; any other goes to the
API's own pages. The configuration alone decides where, never what the request says.

The gateway serves the chat page itself, so that it talks to its own origin, with the API's TLS and names. The page
needs no key; what it sends to `/v1/chat/completions` does. Called by aiohttp.
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
