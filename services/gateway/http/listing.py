"""What a client may ask of a list in its URL, and ids as URLs carry them. Pure; called by the APIs that keep things."""

from __future__ import annotations

from collections.abc import Mapping

from aiohttp import web

from cohort.common.errors import RequestError
from cohort.services.gateway.http.service_headers import printable


def query_of(request: web.Request, *known: str) -> dict[str, str]:
    """Return the query. Raises `RequestError` for a parameter that is not `known`."""
    query = dict(request.query)
    if unknown := next((name for name in query if name not in known), None):
        raise RequestError(f"There is no parameter {printable(unknown)!r}.", param=printable(unknown))
    if "after" in query:
        query["after"] = known_id(query["after"])
    return query


def limit_of(query: Mapping[str, str], *, default: int, most: int) -> int:
    text = query.get("limit", str(default))
    limit = int(text) if text.isascii() and text.isdecimal() and len(text) < 9 else 0
    if not 1 <= limit <= most:
        raise RequestError(f"limit must be a number from 1 to {most}.", param="limit")
    return limit


def known_id(text: str) -> str:
    """Return an id to look up: half characters, which a URL can carry, are in no id."""
    return text.encode("utf-8", "replace").decode("utf-8")
