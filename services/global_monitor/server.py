"""The monitor's HTTP side: live page, its JSON, aggregated metrics, health.

    GET /            the live page                    GET /metrics        all processes, Prometheus text
    GET /api/state   the state as JSON (?history_s=)  GET /health /ready  of the monitor itself

Called by `service.py`. Read-only: nothing here changes any state.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from aiohttp import web

from cohort.common.metrics import CONTENT_TYPE
from cohort.services.global_monitor.exporter import Exporter
from cohort.services.global_monitor.page import INDEX_HTML, ClusterState

_SECURITY = {
    # The page carries its own script and style and talks to no other server.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}


def application(
    exporter: Exporter, read_state: Callable[[float], ClusterState], *, max_history_s: float, instance: str
) -> web.Application:
    """`read_state(history_s)` gives what the page shows."""
    page = INDEX_HTML.read_text(encoding="utf-8")  # read at start: a missing file is noticed then

    async def index(_: web.Request) -> web.Response:
        return web.Response(text=page, content_type="text/html", headers={**_SECURITY, "Cache-Control": "no-cache"})

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
        return web.json_response({"status": "ok", "role": "global_monitor", "instance": instance})

    async def ready(_: web.Request) -> web.Response:
        return web.json_response({"ready": True})

    app = web.Application()
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
