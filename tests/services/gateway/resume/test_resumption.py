"""Streams whose connection breaks, through the gateway's port: the rest comes to the letter, here and elsewhere."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from cohort.common.clock import SystemClock
from cohort.common.keys.key_file import OwnLimits
from cohort.services.gateway.http.request_bodies import most_in_flight
from cohort.services.gateway.resume.resume_marks import Place
from cohort.services.gateway.resume.resume_store import ResumeStore
from tests.examples import another_of_its_kind
from tests.services.gateway.apis.test_tenants import add, budget_of, usage
from tests.services.gateway.cluster import Manager
from tests.services.gateway.conftest import ANSWER, OpenSite, Site, eventually

KEEP = {"x-cohort-resume": "keep"}
PROMPT: dict[str, Any] = {"prompt": "Tell me", "temperature": 0, "stream_options": {"include_usage": True}}
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Tell me"}], "stream_options": {"include_usage": True}}
STEP_S = 0.01


@dataclass
class Read:
    """What a client got of a stream, over all its connections."""

    token: str = ""
    last: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    reasoning: dict[int, str] = field(default_factory=dict)
    scores: dict[int, list[Any]] = field(default_factory=dict)
    calls: dict[tuple[int, int], dict[str, str]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: list[Any] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    done: bool = False
    status: int = 0

    def take(self, block: bytes) -> None:
        lines = dict(line.split(": ", 1) for line in block.decode().strip().split("\n"))
        if lines["data"] == "[DONE]":
            self.done = True
            return
        event = msgspec.json.decode(lines["data"])
        if "error" in event:
            self.errors.append(event["error"])
            return
        self.last = lines["id"]
        self.ids.append(event["id"])
        if event.get("usage"):
            self.usage.append(event["usage"])
        for choice in event["choices"]:
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.texts[index] = self.texts.get(index, "") + text
            if thought := choice.get("delta", {}).get("reasoning_content"):
                self.reasoning[index] = self.reasoning.get(index, "") + thought
            for delta in choice.get("delta", {}).get("tool_calls", []):
                place = (index, delta["index"])
                assert ("id" in delta) == (place not in self.calls), "a call begins once"
                call = self.calls.setdefault(place, {"id": delta.get("id", ""), "name": "", "arguments": ""})
                call["name"] += delta["function"].get("name", "")
                call["arguments"] += delta["function"]["arguments"]
            if choice.get("logprobs"):
                told = choice["logprobs"].get("tokens") or choice["logprobs"].get("content") or []
                self.scores.setdefault(index, []).extend(told)
            if choice["finish_reason"]:
                assert index not in self.finish
                self.finish[index] = choice["finish_reason"]


@asynccontextmanager
async def reading(site: Site, read: Read, path: str, body: Any = None, **headers: str) -> AsyncIterator[Any]:
    """One connection; body None: of a resume. Yields an iterator over its events, taken into `read`."""
    async with aiohttp.ClientSession(headers=headers) as session:
        if body is None:
            asked = session.get(site.url + path, headers={"Last-Event-ID": read.last} if read.last else {})
        else:
            asked = session.post(site.url + path, json={**body, "stream": True}, headers=KEEP)
        async with asked as response:
            read.status = response.status
            if response.status != 200:
                read.errors.append((await response.json())["error"])
                yield None
                return
            read.token = response.headers.get("x-cohort-resume", "")

            async def events() -> AsyncIterator[None]:
                buffer = b""
                async for data in response.content.iter_any():
                    buffer += data
                    while b"\n\n" in buffer:
                        block, buffer = buffer.split(b"\n\n", 1)
                        read.take(block)
                        yield

            yield events()


def copied(folder: Path) -> dict[str, Any]:
    """Section `state` of a second gateway: the database of streams as a killed one leaves it."""
    copy = folder / "copy"
    copy.mkdir()
    with sqlite3.connect(folder / "streams.sqlite3") as source, sqlite3.connect(copy / "streams.sqlite3") as target:
        source.backup(target)
    return {"folder": str(copy)}


async def some(site: Site, read: Read, count: int, path: str, body: Any = None, **headers: str) -> None:
    """So many events, then the connection breaks."""
    async with reading(site, read, path, body, **headers) as events:
        if events is not None:
            left = count
            async for _ in events:
                left -= 1
                if left <= 0 or read.done:
                    return


@contextmanager
def hurrying(site: Site) -> Iterator[None]:
    """No connection breaks any more: nothing has to be left to say at a certain time."""
    step_s, site.manager.step_s = site.manager.step_s, 0.0
    yield
    site.manager.step_s = step_s


async def rest(site: Site, read: Read, **headers: str) -> None:
    async with reading(site, read, f"/v1/streams/{read.token}", **headers) as events:
        if events is not None and not read.done:
            await anext(events, None)  # the stream is this connection's now
            with hurrying(site):
                async for _ in events:
                    pass


async def whole(site: Site, path: str, body: Any, **headers: str) -> Read:
    read = Read()
    with hurrying(site):
        await some(site, read, 1_000_000, path, body, **headers)
    assert read.done and not read.errors
    return read


def same(ours: Read, theirs: Read) -> None:
    assert ours.done and not ours.errors
    assert (ours.texts, ours.reasoning) == (theirs.texts, theirs.reasoning)
    assert ours.finish == theirs.finish
    assert ours.scores == theirs.scores
    assert {place: (call["name"], call["arguments"]) for place, call in ours.calls.items()} == {
        place: (call["name"], call["arguments"]) for place, call in theirs.calls.items()
    }
    assert [each["completion_tokens"] for each in ours.usage] == [each["completion_tokens"] for each in theirs.usage]
    assert [each["prompt_tokens"] for each in ours.usage] == [each["prompt_tokens"] for each in theirs.usage]
    assert len(set(ours.ids)) == 1


BODIES: list[Any] = [
    ("/v1/completions", PROMPT),
    ("/v1/completions", {**PROMPT, "logprobs": 2}),
    ("/v1/completions", {**PROMPT, "n": 3, "temperature": 1, "seed": 5}),
    ("/v1/completions", {**PROMPT, "prompt": ["Tell me", "Say"], "echo": True}),
    ("/v1/completions", {**PROMPT, "stop": ["123"]}),
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", {**CHAT, "logprobs": True, "top_logprobs": 1, "n": 2, "temperature": 1}),
]
SOME = [
    body if place in (1, 2, 4, 6) else pytest.param(*body, marks=another_of_its_kind())
    for place, body in enumerate(BODIES)
]
"""By default scores, choices and stop strings, and a chat."""


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_rest_of_a_broken_stream(open_site: OpenSite, path: str, body: Any) -> None:
    async with open_site(step_s=STEP_S) as site:
        undisturbed = await whole(site, path, body)
        read = Read()
        await some(site, read, 3, path, body)
        assert read.token and not read.done
        for _ in range(3):  # again and again, wherever it breaks
            await some(site, read, 2, f"/v1/streams/{read.token}")
        await rest(site, read)
        same(read, undisturbed)
        assert read.texts[0].endswith(ANSWER if "stop" not in body else ANSWER.split("123")[0])
        await eventually(site.nothing_left)


@pytest.mark.parametrize(("path", "body"), SOME)
async def test_from_every_place_of_a_stream_that_is_over(open_site: OpenSite, path: str, body: Any) -> None:
    async with open_site(step_s=0.001) as site:
        undisturbed = await whole(site, path, body)
        count = len(undisturbed.ids)
        for seen in range(1, count + 1, max(1, count // 12)):
            read = Read()
            await some(site, read, seen, path, body)
            await eventually(site.nothing_left)
            await rest(site, read)
            same(read, undisturbed)


@pytest.mark.parametrize(("path", "body"), SOME)
async def test_another_gateway_goes_on_behind_what_was_written(
    open_site: OpenSite, tmp_path: Path, path: str, body: Any
) -> None:
    """The first one lives: it learns that the stream is no longer its own, and frees everything. It is slow, so that
    there is something left to write when the other one comes."""
    async with open_site(step_s=3 * STEP_S) as first, open_site(step_s=STEP_S, instance="other") as second:
        undisturbed = await whole(first, path, body)
        read = Read()
        await some(first, read, 4, path, body)
        at = read.last
        await some(second, read, 3, f"/v1/streams/{read.token}")
        again: Manager = second.manager
        await eventually(lambda: bool(again.submitted))  # what was left to read may have been all that was written
        submitted = again.submitted[0]
        assert submitted.output_known >= max(Place.parse(at, len(read.texts)).tokens) - 1 > 0
        await rest(second, read)
        same(read, undisturbed)
        await eventually(first.nothing_left)
        await eventually(second.nothing_left)


async def test_a_gateway_that_shuts_down_leaves_its_streams_to_the_next(open_site: OpenSite) -> None:
    body = {**PROMPT, "max_tokens": 40}
    async with open_site(lambda request: [9] * 400, step_s=0.001) as site:
        undisturbed = await whole(site, "/v1/completions", body)
    read = Read()
    async with open_site(lambda request: [9] * 400, step_s=0.05, drain_s=0.05) as first:
        async with reading(first, read, "/v1/completions", body) as events:
            for _ in range(3):
                await anext(events)
            first.context.stopping.set()
            async for _ in events:
                pass
        assert [error["code"] for error in read.errors] == ["503"]
    read.errors, read.done = [], False
    async with open_site(lambda request: [9] * 400, step_s=0.001) as second:
        await rest(second, read)
    same(read, undisturbed)


async def test_a_later_connection_takes_over(open_site: OpenSite) -> None:
    async with open_site(step_s=STEP_S) as site:
        undisturbed = await whole(site, "/v1/completions", PROMPT)
        site.manager.step_s = 10 * STEP_S  # it is not over before the later one asks
        early = Read()
        async with reading(site, early, "/v1/completions", PROMPT) as events:
            for _ in range(3):
                await anext(events)
            late = Read(token=early.token)  # without a place: from the beginning
            await rest(site, late)
            async for _ in events:
                pass
        assert [error["code"] for error in early.errors] == ["409"]
        same(late, undisturbed)


async def test_without_asking_a_stream_is_as_before(open_site: OpenSite) -> None:
    async with open_site(step_s=STEP_S) as site:
        async with site.session.post(site.url + "/v1/completions", json={**PROMPT, "stream": True}) as response:
            assert "x-cohort-resume" not in response.headers
            assert b"id: " not in (await response.content.readany())
        await eventually(site.nothing_left)
        assert site.manager.cancelled


async def test_nobody_comes_back(open_site: OpenSite, tmp_path: Path) -> None:
    async with open_site(lambda request: [9] * 4000, step_s=STEP_S, resume_s=0.3) as site:
        read = Read()
        await some(site, read, 3, "/v1/completions", {**PROMPT, "max_tokens": 200})
        assert site.manager.held()
        await eventually(site.nothing_left)
        await eventually(lambda: states(tmp_path) == [("gone", None)])
        await rest(site, read)
        assert (read.status, read.errors[0]["code"]) == (410, "410")


@pytest.mark.parametrize("hours", [1, -1])
async def test_a_wall_clock_that_is_set_ends_no_stream(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch, hours: int
) -> None:
    """Neither the gateway that generates it nor another one on the same store finds it over its time."""
    async with open_site(step_s=STEP_S) as first, open_site(step_s=STEP_S, instance="other") as second:
        read = Read()
        await some(first, read, 3, "/v1/completions", PROMPT)
        real = SystemClock.wall_s
        monkeypatch.setattr(SystemClock, "wall_s", staticmethod(lambda: real() + 3600 * hours))
        for each in (second, first):
            streams = each.gateway._resumption
            streams._swept_s = float("-inf")
            await streams._sweep()
        await rest(second, read)
        assert read.done and read.texts[0] == ANSWER


def states(folder: Path) -> list[Any]:
    with sqlite3.connect(folder / "streams.sqlite3") as database:
        assert database.execute("SELECT count(*) FROM said JOIN streams USING (token)").fetchone()[0] >= 0
        return database.execute("SELECT state, record FROM streams").fetchall()


async def test_what_is_over_its_time_goes_from_the_disk(open_site: OpenSite, tmp_path: Path) -> None:
    async with open_site(resume_s=0.2) as site:
        await whole(site, "/v1/completions", PROMPT)
        await eventually(lambda: states(tmp_path) == [("gone", None)])
        with sqlite3.connect(tmp_path / "streams.sqlite3") as database:
            assert database.execute("SELECT count(*) FROM said").fetchone() == (0,)
    assert (tmp_path / "streams.sqlite3").stat().st_mode & 0o077 == 0


async def test_a_client_ends_its_stream(open_site: OpenSite, tmp_path: Path) -> None:
    async with open_site(lambda request: [9] * 4000, step_s=STEP_S) as site, open_site(instance="other") as second:
        for asked in (site, second):
            read = Read()
            await some(site, read, 3, "/v1/completions", {**PROMPT, "max_tokens": 200})
            async with asked.session.delete(f"{asked.url}/v1/streams/{read.token}") as response:
                assert response.status == 204
            await eventually(site.nothing_left)
            await rest(asked, read)
            assert read.status == 410
        async with site.session.delete(f"{site.url}/v1/streams/unknown") as response:
            assert response.status == 404


@pytest.mark.parametrize(
    ("headers", "body", "said"),
    [
        ({"x-cohort-resume": "yes"}, {"stream": True}, "'keep'"),
        (KEEP, {}, "only a stream"),
        (KEEP, {"stream": True, "echo": True, "logprobs": 1}, "log-probabilities of the prompt"),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_name(
    site: Site, headers: dict[str, str], body: dict[str, Any], said: str
) -> None:
    status, answer = await site.post("/v1/completions", {"prompt": "x", "max_tokens": 2, **body}, headers=headers)
    assert (status, answer["error"]["param"]) == (400, "x-cohort-resume")
    assert said in answer["error"]["message"]


async def test_a_place_that_is_none_changes_nothing(open_site: OpenSite) -> None:
    async with open_site(step_s=STEP_S) as site:
        read = Read()
        await some(site, read, 3, "/v1/completions", PROMPT)
        for place in ("x", "1,2", "99999", "-1", "3,u", "1e9"):
            status, answer = await site.get(f"/v1/streams/{read.token}", headers={"Last-Event-ID": place})
            assert (status, answer["error"]["param"]) == (400, "Last-Event-ID"), place
        await rest(site, read)
        assert read.done and read.texts[0] == ANSWER


async def test_a_wrong_place_at_another_gateway_leaves_nothing_behind(open_site: OpenSite, tmp_path: Path) -> None:
    async with open_site(step_s=STEP_S) as first, open_site(step_s=STEP_S, instance="other") as second:
        read = Read()
        await some(first, read, 3, "/v1/completions", PROMPT)
        assert (await second.get(f"/v1/streams/{read.token}", headers={"Last-Event-ID": "99999"}))[0] == 400
        await eventually(second.nothing_left)
        await rest(second, read)
        assert read.done and read.texts[0] == ANSWER


async def test_a_stream_that_was_claimed_with_a_wrong_place_expires_too(open_site: OpenSite, tmp_path: Path) -> None:
    async with (
        open_site(lambda request: [9] * 4000, step_s=STEP_S) as first,
        open_site(lambda request: [9] * 4000, step_s=STEP_S, resume_s=0.3, instance="other") as second,
    ):
        read = Read()
        await some(first, read, 3, "/v1/completions", {**PROMPT, "max_tokens": 200})
        assert (await second.get(f"/v1/streams/{read.token}", headers={"Last-Event-ID": "99999"}))[0] == 400
        await eventually(lambda: states(tmp_path) == [("gone", None)])
        await eventually(second.nothing_left)


async def test_a_disk_that_refuses_for_a_while_leaves_no_gap(
    open_site: OpenSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append, calls = ResumeStore.append, iter(range(1000))

    def refusing(store: ResumeStore, *args: Any) -> Any:
        if next(calls) % 3:
            raise sqlite3.OperationalError("disk I/O error")
        return append(store, *args)

    monkeypatch.setattr(ResumeStore, "append", refusing)
    async with open_site(step_s=STEP_S) as site:
        read = await whole(site, "/v1/completions", PROMPT)
        await eventually(site.nothing_left)
        again = Read(token=read.token)
        await rest(site, again)
        same(again, read)
        assert again.texts[0] == ANSWER


@pytest.mark.parametrize("body", [PROMPT, {**PROMPT, "n": 2, "temperature": 1}, {**PROMPT, "stop": ["fox"]}])
async def test_what_the_disk_refused_before_a_kill_comes_again_unseen(
    open_site: OpenSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    """The client is further than what was written, and to the end of its choice where a stop string ended that."""
    append, full = ResumeStore.append, False

    def refusing(store: ResumeStore, *args: Any) -> Any:
        if full:
            raise sqlite3.OperationalError("database or disk is full")
        return append(store, *args)

    monkeypatch.setattr(ResumeStore, "append", refusing)
    async with open_site(step_s=STEP_S) as first:
        undisturbed = await whole(first, "/v1/completions", body)
        read, begun = Read(), 0

        async def in_step() -> None:
            nonlocal begun
            begun += 1
            await eventually(lambda begun=begun: full or len(read.ids) >= begun - 1)

        first.manager.gate = in_step
        async with reading(first, read, "/v1/completions", body) as events:
            for _ in range(3):
                await anext(events)
            full = True
            for _ in range(6):
                await anext(events)
                if read.finish:
                    break
            copy = copied(tmp_path)
        full = False
        async with open_site(step_s=STEP_S, state=copy) as second:
            told = len(read.ids)
            await some(second, read, 2, f"/v1/streams/{read.token}")
            assert second.manager.submitted[0].output_known < told
            await rest(second, read)
            same(read, undisturbed)
            await eventually(second.nothing_left)


async def test_off_or_full_it_is_a_plain_stream(open_site: OpenSite) -> None:
    for options in ({"resume_s": 0.0}, {"limits": {"streams_bytes": 1000}}):
        async with open_site(**options) as site:
            async with site.session.post(
                site.url + "/v1/completions", json={**PROMPT, "stream": True}, headers=KEEP
            ) as response:
                assert response.status == 200 and "x-cohort-resume" not in response.headers
                assert (await response.read()).endswith(b"data: [DONE]\n\n")
            assert (await site.get("/v1/streams/any"))[0] == 404
            await eventually(site.nothing_left)


async def test_a_stream_is_charged_by_its_length_before_it_is_read(open_site: OpenSite) -> None:
    async with open_site(step_s=STEP_S) as site:
        read = Read()
        await some(site, read, 3, "/v1/completions", PROMPT)
        await rest(site, read)
        bodies = site.gateway.generator.bodies
        with bodies.holding() as take:
            take(most_in_flight(site.gateway._config.gateway) - 10)
            refused = Read(token=read.token)
            await rest(site, refused)
            assert refused.status == 429
        again = Read(token=read.token)
        await rest(site, again)
        assert again.done and again.texts == read.texts and bodies.in_flight_bytes == 0


async def test_an_error_is_the_end_of_a_stream_too(open_site: OpenSite) -> None:
    async with open_site(lambda request: [9] * 4000, step_s=STEP_S) as site:
        read = Read()
        await some(site, read, 3, "/v1/completions", {**PROMPT, "max_tokens": 200})
        for entry in site.gateway.streams.ledger.entries():
            entry.expires_s = 0.0
        await eventually(site.nothing_left)
        seen = read.texts[0]
        await rest(site, read)
        assert [error["code"] for error in read.errors] == ["504"]
        assert read.texts[0].startswith(seen)


# -- keys ----------------------------------------------------------------------------------------------------------


async def test_a_stream_is_its_keys_and_is_charged_once(open_site: OpenSite, tmp_path: Path) -> None:
    file = tmp_path / "keys" / "keys.json"
    alice, bob = add(file, "alice"), add(file, "bob")
    keys = {"file": str(file)}
    async with (
        open_site(step_s=STEP_S, keys=keys) as first,
        open_site(step_s=STEP_S, keys=keys, instance="other") as second,
    ):
        read = Read()
        await some(first, read, 3, "/v1/completions", PROMPT, **alice)
        for site in (first, second):
            stranger = Read(token=read.token, last=read.last)
            await rest(site, stranger, **bob)
            assert stranger.status == 404
            assert (await site.get(f"/v1/streams/{read.token}"))[0] == 401
        await some(first, read, 2, f"/v1/streams/{read.token}", **alice)
        await some(second, read, 2, f"/v1/streams/{read.token}", **alice)
        await rest(second, read, **alice)
        assert read.done and read.texts[0] == ANSWER
        await rest(second, Read(token=read.token), **alice)
        await eventually(first.nothing_left)
        await asyncio.sleep(0.05)
        for site in (first, second):
            await usage(site, alice)
        [row] = await usage(first, alice)
        [told] = read.usage
        assert (row["requests"], row["prompt_tokens"], row["completion_tokens"]) == (
            1,
            told["prompt_tokens"],
            told["completion_tokens"],
        )


async def test_a_stream_that_is_left_to_the_next_gateway_is_charged_once(open_site: OpenSite, tmp_path: Path) -> None:
    file = tmp_path / "keys" / "keys.json"
    alice = add(file, "alice")
    keys, body = {"file": str(file)}, {**PROMPT, "max_tokens": 40}
    read = Read()
    async with (
        open_site(lambda request: [9] * 400, step_s=0.05, drain_s=0.05, keys=keys) as first,
        reading(first, read, "/v1/completions", body, **alice) as events,
    ):
        for _ in range(3):
            await anext(events)
        first.context.stopping.set()
        async for _ in events:
            pass
    assert [error["code"] for error in read.errors] == ["503"]
    read.errors, read.done = [], False
    async with open_site(lambda request: [9] * 400, step_s=0.001, keys=keys) as second:
        await rest(second, read, **alice)
        await eventually(lambda: not budget_of(second, "alice").open)
        [row], [told] = await usage(second, alice), read.usage
        assert row["prompt_tokens"] == told["prompt_tokens"]
        assert row["completion_tokens"] == told["completion_tokens"]


async def test_a_resumption_is_one_request_at_whichever_gateway(open_site: OpenSite, tmp_path: Path) -> None:
    file = tmp_path / "keys" / "keys.json"
    alice = add(file, "alice", rt=OwnLimits(requests_per_minute=3))
    keys = {"file": str(file)}
    async with open_site(step_s=STEP_S, keys=keys) as first:
        read = Read()
        await some(first, read, 2, "/v1/completions", PROMPT, **alice)
        await some(first, read, 2, f"/v1/streams/{read.token}", **alice)
        assert int(budget_of(first, "alice").requests.level(first.context.clock.now_s())) == 1
        async with open_site(step_s=STEP_S, keys=keys, instance="other") as second:
            await rest(second, read, **alice)
            assert read.done and int(budget_of(second, "alice").requests.level(second.context.clock.now_s())) == 2


async def test_a_stream_without_a_reader_counts_as_open(open_site: OpenSite, tmp_path: Path) -> None:
    file = tmp_path / "keys" / "keys.json"
    alice = add(file, "alice", rt=OwnLimits(concurrent_requests=1))
    keys = {"file": str(file)}
    async with open_site(step_s=STEP_S, keys=keys) as site:
        read, was_refused = Read(), asyncio.Event()
        site.manager.gate = lambda: was_refused.wait() if read.ids else asyncio.sleep(0)
        await some(site, read, 1, "/v1/completions", PROMPT, **alice)
        refused = Read()
        await some(site, refused, 1, "/v1/completions", PROMPT, **alice)
        assert refused.status == 429
        was_refused.set()
        await rest(site, read, **alice)
        assert read.done
        again = Read()
        await eventually(lambda: not budget_of(site, "alice").open)
        await some(site, again, 1, "/v1/completions", PROMPT, **alice)
        assert again.status == 200
