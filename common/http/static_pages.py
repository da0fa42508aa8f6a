"""Pages of plain files: HTML, style sheets and script modules, served as they lie in a folder, under a strict policy.

Read once, when a server starts, so that no request touches the disk and a missing file is noticed then. A page runs
scripts and styles of its own server alone, connects to no other one, and is shown in no frame, so that a client's text
in markup would do nothing; pages insert it as text only. Used by the monitor (live page) and the gateway (chat); files
of both, such as the theme, lie in `common/web`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

SHARED = Path(__file__).parent.parent / "web"
CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}

Handler = Callable[[web.Request], Coroutine[Any, Any, web.StreamResponse]]


def page_routes(folder: Path, *, index_at: str, files_under: str) -> list[web.RouteDef]:
    """Serve `folder`'s index.html at `index_at`, its other files and the shared ones below `files_under`."""
    files = {
        path.name: path for source in (SHARED, folder) for path in sorted(source.iterdir()) if path.suffix in _TYPES
    }
    routes = []
    for name, path in files.items():
        where = index_at if name == "index.html" else files_under + name
        routes.append(web.get(where, serves(path.read_bytes(), _TYPES[path.suffix])))
    return routes


def serves(data: bytes, content_type: str) -> Handler:
    """Return the handler of one file, or of a page that is made at start."""
    etag = hashlib.sha256(data).hexdigest()[:32]
    # The browser asks every time whether its copy is still good: a page and its modules always fit together.
    headers = {**SECURITY_HEADERS, "Content-Security-Policy": CONTENT_POLICY, "Cache-Control": "no-cache"}

    async def serve(request: web.Request) -> web.StreamResponse:
        known = request.if_none_match
        response: web.StreamResponse
        if known is not None and any(tag.value == etag for tag in known):
            response = web.Response(status=304, headers=headers)
        else:
            response = web.Response(body=data, content_type=content_type, charset="utf-8", headers=headers)
        response.etag = etag
        return response

    return serve
