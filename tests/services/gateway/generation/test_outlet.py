"""Plain tokens reach their client without the handler's task: as the same events, and only where nothing forbids it."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest

from cohort.common.errors import RequestError
from cohort.common.types import FinishReason
from cohort.services.gateway.generation.answering import Outlet
from cohort.services.gateway.generation.delta import Caller, Delta, GatewayTimes, Generation
from cohort.services.gateway.generation.generator import Body
from cohort.services.gateway.generation.preparation import Reservation, prepare
from cohort.services.gateway.http.sse import EventStream
from cohort.services.gateway.resume.resume_marks import parse_last_event_id, resuming_writer
from cohort.services.gateway.resume.resume_session import ended_entry
from tests.services.gateway.cluster import Gate
from tests.services.gateway.conftest import ANSWER, OpenSite, Site
from tests.services.gateway.named_events import named_stream

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


def _body(fields: dict[str, Any]) -> Body:
    return Body(json.dumps(fields).encode(), Caller("", "", 0.0))


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


NAMED = [
    ("/v1/responses", {"model": "tiny", "input": "x", "store": False}, "response.output_text.delta"),
    ("/v1/messages", {"model": "tiny", "messages": CHAT["messages"], "max_tokens": 100}, "content_block_delta"),
]


@pytest.mark.parametrize(("path", "body", "plain"), NAMED)
async def test_named_events_are_the_same_too(
    open_site: OpenSite,
    direct: list[bytes],
    handler_waits: Gate,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    plain: str,
) -> None:
    async with open_site() as site:
        site.manager.gate = handler_waits
        directly = await named_stream(site, path, body)
        assert direct and all(event.startswith(b"event: %b\n" % plain.encode()) for event in direct)
        monkeypatch.setattr(Outlet, "at_once", False)
        by_task = await named_stream(site, path, body)
    assert [event["type"] for event in directly] == [event["type"] for event in by_task]
    assert [event["delta"] for event in directly if event["type"] == plain] == [
        event["delta"] for event in by_task if event["type"] == plain
    ]


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


class Reads:
    """A sink whose client keeps up now and then."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self.events: list[bytes] = []
        self.always = False

    @property
    def keeps_up(self) -> bool:
        return bool(self.events) and (self.always or self._random.random() < 0.8)

    def soon(self, event: bytes) -> None:
        self.events.append(event)

    async def send(self, events: Sequence[bytes]) -> None:
        self.events += events
        await asyncio.sleep(0)


BODIES: list[tuple[int, dict[str, Any]]] = [
    (0, TEXT),
    (0, {**TEXT, "n": 3, "stream_options": {"include_usage": True}}),
    (0, {**TEXT, "stop": ["zzz"]}),
    (1, CHAT),
    (2, NAMED[0][1]),
    (3, NAMED[1][1]),
]


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize(("which", "body"), BODIES)
async def test_however_tokens_come_their_client_reads_the_same(
    open_site: OpenSite, which: int, body: dict[str, Any], marked: bool
) -> None:
    """Any tokens, also parts of characters, in any portions, to handlers and clients that are busy or not."""
    async with open_site() as site:
        generator = site.gateway.generator
        endpoint = site.gateway._resumption._endpoints[which]
        asked = await endpoint.read(_body({**body, "stream": True}), {})
        card, at_once = generator.served.card, 0
        for seed in range(40):
            random = Random(seed)
            requests = prepare(
                asked.call, [[5]], base_id="r", gateway="g", seed=1, arrival_s=0.0, card=card, token_limits=[99]
            )
            left = {index: random.choices(range(100, 400), k=random.randint(1, 30)) for index in range(len(requests))}
            whole = {index: generator.served.tokenizer.decode(left[index], skip_special=True) for index in left}
            entries = [ended_entry(0.0, request, None) for request in requests]
            answering = generator.new_answer(
                asked.call, requests, Generation(GatewayTimes(0.0), entries), "r", 1.0, Reservation(generator.budget, 0)
            )
            writer, sink = asked.writer(answering), Reads(random)
            if marked:
                writer = resuming_writer(answering, writer, {}, parse_last_event_id(endpoint.kind, len(requests), ""))
            running = asyncio.create_task(answering.outlet.run(answering, writer, sink))
            while left:
                index = random.choice(list(left))
                taken, left[index] = left[index][: (count := random.randint(1, 3))], left[index][count:]
                before = len(sink.events)
                if left[index]:
                    answering.outlet.put_tokens(index, taken)
                else:
                    answering.outlet.put(Delta(index, taken, finish=FinishReason.LENGTH))
                    del left[index]
                at_once += len(sink.events) > before
                for _ in range(random.randint(0, 4)):
                    await asyncio.sleep(0)
            await running
            assert _read(sink.events) == whole, seed
            if marked and which >= 2:
                ids = [int(event[4 : event.index(b"\n")]) for event in sink.events if event.startswith(b"id: ")]
                assert ids == list(range(len(ids)))
        assert bool(at_once) == ("stop" not in body)


async def test_a_stream_is_quiet_only_when_nothing_was_sent_for_so_long(open_site: OpenSite) -> None:
    keepalive_s, keepalive, loop = 0.05, 0, asyncio.get_running_loop()
    async with open_site() as site:
        generator = site.gateway.generator
        asked = await site.gateway._resumption._endpoints[3].read(_body(NAMED[1][1]), {})
        answering = await generator.begin(asked.call, 9, Caller("", "", 0.0), Outlet())
        writer, sink, heard_s = asked.writer(answering), Reads(Random(1)), loop.time()

        def noted() -> list[bytes]:
            nonlocal keepalive
            keepalive += 1
            assert loop.time() - heard_s > 0.9 * keepalive_s
            return []

        writer.keepalive = noted  # type: ignore[method-assign]
        sink.always = True
        running = asyncio.create_task(answering.outlet.run(answering, writer, sink, keepalive_s))
        answering.outlet.put(Delta(0, [300]))
        for _ in range(10):
            await asyncio.sleep(0.03)
            answering.outlet.put_tokens(0, [300])
            heard_s = loop.time()
        while not keepalive:  # noqa: ASYNC110 -- nothing happens: that is what is waited for
            await asyncio.sleep(0.01)
        answering.outlet.put(Delta(0, [300], finish=FinishReason.LENGTH))
        await running
        generator.release(answering)


def _read(events: list[bytes]) -> dict[int, str]:
    """The text of each choice."""
    texts: dict[int, str] = {}
    for event in events:
        data = json.loads(event[event.index(b"data: ") + 6 :]) if b"[DONE]" not in event else {}
        for choice in data.get("choices", ()):
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + text
        if data.get("type") in ("response.output_text.delta", "content_block_delta"):
            delta = data["delta"]
            texts[0] = texts.get(0, "") + (delta if isinstance(delta, str) else delta["text"])
    return texts


async def test_tokens_before_an_error_are_sent_before_it(open_site: OpenSite) -> None:
    async with open_site() as site:
        generator = site.gateway.generator
        asked = await site.gateway._resumption._endpoints[0].read(_body(TEXT), {})
        answering = await generator.begin(asked.call, 9, Caller("", "", 0.0), Outlet())
        answering.outlet.put(Delta(0, site.tokenizer.encode("so far", special_tokens=False)))
        answering.outlet.put(Delta(0, error=RequestError("broken", status=503)))
        sink = Reads(Random(1))
        with pytest.raises(RequestError, match="broken"):
            await answering.outlet.run(answering, asked.writer(answering), sink)
        assert _read(sink.events) == {0: "so far"} and answering.used()[1] > 0
        generator.release(answering)


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
