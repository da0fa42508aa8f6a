"""`GET /chat`: a small page to try the model with.

Served by the gateway itself, so that the page talks to its own origin: no other origin has to be let in, TLS and names
are those of the API, and keys work as for every client. The page itself needs no key; what it sends to
`/v1/chat/completions` does. Its files lie in `static`. Decides nothing.
"""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from cohort.common.http.static_pages import page_routes

CHAT_PATH = "/chat"
_FOLDER = Path(__file__).parent / "static"


class ChatPage:
    def routes(self) -> list[web.RouteDef]:
        return page_routes(_FOLDER, index_at=CHAT_PATH, files_under=f"{CHAT_PATH}/")
