"""The monitor's HTTP side: live page, its JSON, aggregated metrics, health.

    GET /            the live page                    GET /metrics        all processes, Prometheus text
    GET /api/state   the state as JSON (?history_s=)  GET /health /ready  of the monitor itself

Called by `__main__.py`. Read-only: nothing here changes any state. No key is asked for, so the pages of other sites are
kept out (`common/browsers.py`).
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable

import msgspec
from aiohttp import web

from cohort import __version__
from cohort.common.browsers import BrowserGuard
from cohort.common.http_server import refuse_foreign_pages
from cohort.common.metrics import CONTENT_TYPE
from cohort.services.global_monitor.exporter import Exporter
from cohort.services.global_monitor.page import INDEX_HTML, ClusterState

_SECURITY = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def content_policy(page: str) -> str:
    """The page runs the script and style it carries, known by their hashes, and talks to no other server: code that a
    name or a stat smuggles into it is neither run nor sent anywhere."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digests = (hashlib.sha256(text.encode()).digest() for text in found)
        return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


async def _secure(_: web.Request, response: web.StreamResponse) -> None:
    for name, value in _SECURITY.items():
        response.headers.setdefault(name, value)


def application(
    exporter: Exporter,
    read_state: Callable[[float], ClusterState],
    *,
    max_history_s: float,
    instance: str,
    guard: BrowserGuard,
) -> web.Application:
    """`read_state(history_s)` gives what the page shows."""
    page = INDEX_HTML.read_text(encoding="utf-8")  # read at start: a missing file is noticed then
    page_headers = {"Content-Security-Policy": content_policy(page), "Cache-Control": "no-cache"}

    async def index(_: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html", headers=page_headers)

    async def api_state(request: web.Request) -> web.Response:
        try:
            history_s = float(request.query.get("history_s", "120"))
        except ValueError:
            raise web.HTTPBadRequest(text="history_s must be a number of seconds\n") from None
        body = msgspec.json.encode(read_state(min(max(0.0, history_s), max_history_s)))
        return web.Response(body=body, content_type="application/json", headers={"Cache-Control": "no-store"})

    async def metrics(_: web.Request) -> web.Response:
        return web.Response(body=await exporter.expose(), headers={"Content-Type": CONTENT_TYPE})

    async def health(_: web.Request) -> web.Response:
        own = {"role": "global_monitor", "instance": instance, "version": __version__}
        return web.json_response({"status": "ok", **own})

    async def ready(_: web.Request) -> web.Response:
        return web.json_response({"ready": True})

    app = web.Application(middlewares=[refuse_foreign_pages(guard)])
    app.on_response_prepare.append(_secure)
    app.add_routes(
        [
            web.get("/", index),
            web.get("/api/state", api_state),
            web.get("/metrics", metrics),
            web.get("/health", health),
            web.get("/ready", ready),
        ]
    )
    return app
