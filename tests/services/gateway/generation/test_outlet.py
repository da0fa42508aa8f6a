"""Plain tokens reach their client without the handler's task: as the same events, and only where nothing forbids it."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest

from cohort.services.gateway.generation.answering import Outlet
from cohort.services.gateway.generation.delta import Delta
from cohort.services.gateway.http.sse import EventStream
from tests.services.gateway.cluster import Gate
from tests.services.gateway.conftest import ANSWER, OpenSite, Site

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 100}
TEXT = {"model": "tiny", "prompt": "x", "max_tokens": 100}
PLAIN = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", TEXT),
    ("/v1/completions", {**TEXT, "n": 3, "stream_options": {"include_usage": True}}),
    ("/v1/completions", {**TEXT, "echo": True}),
]
LOOKED_AT = [
    ("/v1/completions", {**TEXT, "stop": ["東"]}),
    ("/v1/completions", {**TEXT, "logprobs": 1}),
    ("/v1/chat/completions", {**CHAT, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
]


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The events that went directly."""
    sent: list[bytes] = []
    soon = EventStream.soon

    def noted(self: EventStream, event: bytes) -> None:
        sent.append(event)
        soon(self, event)

    monkeypatch.setattr(EventStream, "soon", noted)
    return sent


async def events_of(site: Site, path: str, body: dict[str, Any]) -> dict[int | None, list[Any]]:
    """By choice, without what differs from request to request; in order."""
    found: dict[int | None, list[Any]] = {}
    for event in await site.stream(path, body):
        if event == "[DONE]":
            continue
        for name in ("id", "created", "cohort"):
            event.pop(name, None)
        found.setdefault(event["choices"][0]["index"] if event["choices"] else None, []).append(event)
    return found


@pytest.mark.parametrize(("path", "body"), PLAIN)
async def test_events_are_the_same_as_by_the_handlers_task(
    open_site: OpenSite,
    direct: list[bytes],
    handler_waits: Gate,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    async with open_site() as site:
        site.manager.gate = handler_waits
        directly = await events_of(site, path, body)
        assert direct, "no event went directly"
        count = len(direct)
        monkeypatch.setattr(Outlet, "at_once", False)
        by_task = await events_of(site, path, body)
        assert len(direct) == count
    assert directly.keys() == by_task.keys()
    for index, events in directly.items():
        assert _text(events) == _text(by_task[index])
        assert index is None or _text(events).endswith(ANSWER)
        assert _frames(events) == _frames(by_task[index])


@pytest.mark.parametrize("choices", [1, 3])
async def test_tokens_of_a_resumable_stream_go_directly_with_their_places(
    open_site: OpenSite, direct: list[bytes], handler_waits: Gate, choices: int
) -> None:
    """Each event that leaves names the tokens so far, and a client goes on behind any of them, directly too."""
    body = {**TEXT, "n": choices, "stream": True}
    async with open_site() as site:
        site.manager.gate = handler_waits
        async with site.session.post(
            f"{site.url}/v1/completions", json=body, headers={"x-cohort-resume": "keep"}
        ) as response:
            token = response.headers["x-cohort-resume"]
            marked = _marked(await response.text())
        assert direct and all(event.startswith(b"id: ") for event in direct), "no event went directly"
        whole = [_texts(marked, index) for index in range(choices)]
        assert all(text.endswith(ANSWER) for text in whole)
        tokens = [[int(part.rstrip("e")) for part in place.split(",")] for place, _ in marked]
        assert all(sum(after) >= sum(before) for before, after in itertools.pairwise(tokens))
        assert max(sum(after) - sum(before) for before, after in itertools.pairwise(tokens)) < sum(tokens[-1])
        for at in range(0, len(marked), 3):
            place = {"Last-Event-ID": marked[at][0]}
            async with site.session.get(f"{site.url}/v1/streams/{token}", headers=place) as response:
                assert response.status == 200
                rest = _marked(await response.text())
            for index in range(choices):
                assert _texts(marked[: at + 1], index) + _texts(rest, index) == whole[index]


@pytest.mark.parametrize(("path", "body"), LOOKED_AT)
async def test_tokens_that_need_a_look_take_the_usual_way(
    open_site: OpenSite, direct: list[bytes], path: str, body: dict[str, Any]
) -> None:
    async with open_site(step_s=0.002) as site:
        assert await events_of(site, path, body)
    assert not direct


async def test_no_token_overtakes_one_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    outlet, direct = Outlet(), []

    def sends(_: Outlet, index: int, tokens: list[int]) -> bool:
        direct.extend(tokens)
        return True

    monkeypatch.setattr(Outlet, "_written", sends)
    outlet.put_tokens(0, [1])  # its handler is busy
    outlet.put_tokens(0, [2])
    assert not direct
    assert (await outlet._arrived()).tokens == [1, 2]
    waiting = asyncio.create_task(outlet._arrived())
    await asyncio.sleep(0)
    outlet.put_tokens(0, [3])
    outlet.put(Delta(0, [4]))
    outlet.put_tokens(0, [5])  # its handler was woken, and has not run yet
    assert direct == [3]
    assert (await waiting).tokens == [4, 5]


async def test_a_client_that_does_not_read_is_not_written_to_for_ever(open_site: OpenSite) -> None:
    """Beyond what its transport buffers the events wait in the outlet, merged; they arrive once it reads."""
    tokens = 6000

    def long(request: Any) -> list[int]:
        return [300] * request.sampling.max_tokens

    async with open_site(long, max_request_work=10_000_000, max_open_work=10_000_000) as site:
        reader, writer = await asyncio.open_connection("127.0.0.1", site.gateway.port, limit=1024)
        body = b'{"model":"tiny","prompt":"x","max_tokens":400,"n":16,"stream":true,"ignore_eos":true}'
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        async with asyncio.timeout(30):
            while site.manager.held():  # noqa: ASYNC110 -- the scripted cluster has no event for it
                await asyncio.sleep(0.01)
        data = b""
        async with asyncio.timeout(30):
            while not data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
                part = await reader.read(1 << 16)
                assert part, data[-200:]
                data += part
        writer.close()
        assert data.count(b'"finish_reason":"length"') == 16
        piece = site.tokenizer.decode([300], skip_special=True).encode()
        assert data.count(piece.strip()) >= tokens
        assert site.nothing_left()


def _marked(stream: str) -> list[tuple[str, Any]]:
    """Its events with their places."""
    found = []
    for event in stream.split("\n\n"):
        if event.startswith("id: "):
            mark, _, data = event.partition("\n")
            found.append((mark.removeprefix("id: "), json.loads(data.removeprefix("data: "))))
    return found


def _texts(marked: list[tuple[str, Any]], index: int) -> str:
    return "".join(c["text"] for _, event in marked for c in event["choices"] if c["index"] == index)


def _text(events: list[Any]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def _frames(events: list[Any]) -> list[str]:
    """The events without their texts, each once, in order."""
    frames = []
    for event in events:
        for choice in event["choices"]:
            where = choice if "text" in choice else choice["delta"]
            where |= {key: "" for key in ("text", "content") if key in where}
        frames.append(repr(event))
    return list(dict.fromkeys(frames))
