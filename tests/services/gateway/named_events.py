"""Reads streams whose events have names, as `/v1/responses` and `/v1/messages` send them."""

from __future__ import annotations

from typing import Any

import msgspec

from tests.services.gateway.conftest import Site


def parse_named(data: bytes) -> list[dict[str, Any]]:
    """The events in order; each must be named as its type says."""
    assert data.endswith(b"\n\n"), data[-80:]
    events = []
    for part in data.decode().removesuffix("\n\n").split("\n\n"):
        name, _, line = part.partition("\n")
        assert name.startswith("event: ") and line.startswith("data: "), part
        event = msgspec.json.decode(line.removeprefix("data: "))
        assert event["type"] == name.removeprefix("event: ")
        events.append(event)
    return events


async def named_stream(site: Site, path: str, body: dict[str, Any], **kwargs: Any) -> list[dict[str, Any]]:
    async with site.session.post(site.url + path, json={**body, "stream": True}, **kwargs) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"] == "text/event-stream"
        return parse_named(await response.read())
