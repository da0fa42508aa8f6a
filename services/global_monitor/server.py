"""The monitor's HTTP side: live page, its JSON, aggregated metrics, health.

    GET /            the live page                    GET /metrics        all processes, Prometheus text
    GET /api/state   the state as JSON (?history_s=)  GET /health /ready  of the monitor itself
    GET /api/live    the page's feed                  GET /static/...     the page's files

Called by `__main__.py`. Read-only: nothing here changes any state. No key is asked for, so the pages of other sites are
kept out (`common/http/browsers.py`).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
from aiohttp import web

from cohort import __version__
from cohort.common.http.browsers import BrowserGuard
from cohort.common.http.http_server import refuse_foreign_pages
from cohort.common.http.static_pages import SECURITY_HEADERS, page_routes
from cohort.common.process.metrics import CONTENT_TYPE
from cohort.common.types import RequestId
from cohort.common.views import MOST_ID
from cohort.services.global_monitor.aggregate import HISTORY_S
from cohort.services.global_monitor.exporter import Exporter
from cohort.services.global_monitor.live import LiveState
from cohort.services.global_monitor.live_views import LiveViews, TooManyViewers
from cohort.services.global_monitor.page import ClusterState

_FOLDER = Path(__file__).parent / "static"
_WRITE_TIMEOUT_S = 20.0
_FIRST_S = 0.15
"""Time from the first request to the first update: processes answer within milliseconds."""
_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}


class LiveFeed:
    """Feed of the live page: server-sent events, one `LiveState` a second as JSON.

    `?request=ID` chooses the request whose life the page shows, `?history_s=` how far its curves go back. Processes are
    asked for their views while a connection is open (`live_views.py`). A slow reader misses updates and gets the latest
    state next; one that takes nothing is let go.
    """

    def __init__(self, looking: LiveViews, read: Callable[[RequestId, float], LiveState]) -> None:
        self._looking = looking
        self._read = read
        self._encode = msgspec.json.Encoder().encode

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Stream updates until the page is closed; 503 if there are too many viewers."""
        chosen = request.query.get("request", "")
        if len(chosen) > MOST_ID:
            raise web.HTTPBadRequest(text=f"request: an id of {MOST_ID} characters at most\n")
        history_s = _history_s(request, "300")
        response = web.StreamResponse(headers=_HEADERS)
        try:
            async with self._looking.watching(chosen) as viewer:
                await response.prepare(request)
                await asyncio.sleep(_FIRST_S)
                while True:
                    viewer.updated.clear()
                    async with asyncio.timeout(_WRITE_TIMEOUT_S):
                        await response.write(b"data: " + self._encode(self._read(chosen, history_s)) + b"\n\n")
                    await viewer.updated.wait()
        except TooManyViewers:
            raise web.HTTPServiceUnavailable(text="too many pages are open\n", headers={"Retry-After": "10"}) from None
        except (TimeoutError, ConnectionError):
            return response


def _history_s(request: web.Request, otherwise: str) -> float:
    try:
        history_s = float(request.query.get("history_s", otherwise))
    except ValueError:
        history_s = math.nan
    if math.isnan(history_s):
        raise web.HTTPBadRequest(text="history_s must be a number of seconds\n")
    return min(max(0.0, history_s), HISTORY_S)


async def _secure(_: web.Request, response: web.StreamResponse) -> None:
    for name, value in SECURITY_HEADERS.items():
        response.headers.setdefault(name, value)


def application(
    exporter: Exporter,
    read_state: Callable[[float], ClusterState],
    *,
    instance: str,
    guard: BrowserGuard,
    feed: LiveFeed,
) -> web.Application:
    """Make the web application. `read_state(history_s)` is for programs; the page lives on the `feed`."""

    async def api_state(request: web.Request) -> web.Response:
        body = msgspec.json.encode(read_state(_history_s(request, "120")))
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
            *page_routes(_FOLDER, index_at="/", files_under="/static/"),
            web.get("/api/state", api_state),
            web.get("/api/live", feed.stream),
            web.get("/metrics", metrics),
            web.get("/health", health),
            web.get("/ready", ready),
        ]
    )
    return app
