"""Resumable streams of `/v1/responses` and `/v1/messages`: wherever they break, all events are those of one stream."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from cohort.services.gateway.resume.resume_store import ResumeStore
from tests.examples import another_of_its_kind
from tests.services.gateway.apis import test_messages_api as messages
from tests.services.gateway.apis import test_responses_api as responses
from tests.services.gateway.conftest import ANSWER, OpenSite, Site, eventually
from tests.services.gateway.resume.test_resumption import KEEP, STEP_S, copied, hurrying, states
from tests.services.gateway.test_structured_output import CALLS, roomy  # noqa: F401

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
ENDS = ("response.completed", "response.incomplete", "message_stop")
FAILURES = ("response.failed", "error")
ASK, SAY = {"input": "Tell me", "temperature": 0}, {**messages.ASK, "temperature": 0}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


@dataclass(frozen=True)
class Case:
    path: str
    body: dict[str, Any]
    answer: str = ANSWER

    def site(self, open_site: OpenSite, model: Path, **options: Any) -> Any:
        return open_site(self.answer, model=model, **{"step_s": STEP_S / 4, **options})


CASES = {
    "text": Case(RESPONSES, ASK),
    "scores": Case(RESPONSES, {**ASK, "top_logprobs": 2}),
    "cut": Case(RESPONSES, {**ASK, "max_output_tokens": 20}),
    "calls": Case(RESPONSES, {**ASK, "tools": [responses.WEATHER, responses.CLOCK]}, CALLS),
    "one call": Case(
        RESPONSES, {**ASK, "tools": [responses.WEATHER, responses.CLOCK], "parallel_tool_calls": False}, CALLS
    ),
    "form": Case(
        RESPONSES,
        {**ASK, "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA}}},
        '{"a": "one two three"}',
    ),
    "message": Case(MESSAGES, SAY),
    "stop": Case(MESSAGES, {**SAY, "stop_sequences": ["123", "x" * 20]}),
    "blocks": Case(MESSAGES, {**SAY, "max_tokens": 400, "tools": [messages.WEATHER, messages.CLOCK]}, CALLS),
    "message form": Case(
        MESSAGES, {**SAY, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}}, '{"a": "one two"}'
    ),
}
SOME = ("scores", "calls", "stop", "blocks")


@dataclass
class Got:
    """Over all connections of a client."""

    token: str = ""
    last: str = ""
    events: list[Any] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    failures: list[Any] = field(default_factory=list)
    pings: int = 0
    status: int = 0
    done: bool = False

    def take(self, block: str) -> None:
        if block.startswith(":"):
            self.done = True  # nothing was left to say
            return
        lines = dict(line.split(": ", 1) for line in block.split("\n"))
        event = msgspec.json.decode(lines["data"])
        assert lines["event"] == event["type"]
        if "id" in lines:
            self.last = lines["id"]
            self.ids.append(int(self.last))
            self.events.append(event)
        elif event["type"] == "ping":
            self.pings += 1
        else:
            assert event["type"] in FAILURES
            self.failures.append(event)
        self.done = event["type"] in ENDS

    def response(self) -> Any:
        return self.events[-1]["response"]


@asynccontextmanager
async def reading(
    site: Site, got: Got, case: Case | None = None, body: Any = None, **headers: str
) -> AsyncIterator[AsyncIterator[None]]:
    """One connection; without a case a resume. Yields what takes one event after the other into `got`."""
    async with aiohttp.ClientSession(headers=headers) as session:
        if case is None:
            last = {"Last-Event-ID": got.last} if got.last else {}
            asked = session.get(f"{site.url}/v1/streams/{got.token}", headers=last)
        else:
            model = {"model": site.gateway._card.name}
            asked = session.post(
                site.url + case.path, json={**(body or case.body), **model, "stream": True}, headers=KEEP
            )
        async with asked as response:
            got.status = response.status
            assert response.status == 200, await response.text()
            got.token = response.headers["x-cohort-resume"]

            async def events() -> AsyncIterator[None]:
                buffer = b""
                async for data in response.content.iter_any():
                    buffer += data
                    while b"\n\n" in buffer:
                        block, buffer = buffer.split(b"\n\n", 1)
                        got.take(block.decode())
                        yield

            yield events()


async def some(site: Site, got: Got, count: int, case: Case | None = None, **headers: str) -> None:
    async with reading(site, got, case, **headers) as events:
        async for _ in events:
            count -= 1
            if count <= 0 or got.done:
                return


async def rest(site: Site, got: Got, **headers: str) -> None:
    async with reading(site, got, **headers) as events:
        await anext(events, None)  # the stream is this connection's now
        if not got.done:
            with hurrying(site):
                async for _ in events:
                    pass


async def whole(site: Site, case: Case, **headers: str) -> Got:
    got = Got()
    with hurrying(site):
        await some(site, got, 1_000_000, case, **headers)
    assert got.done and not got.failures
    return got


def plain(events: list[Any]) -> Any:
    """Of any request: ids by their order, without what tells when and where."""
    text = msgspec.json.encode(events).decode()
    known: dict[str, str] = {}
    text = re.sub(
        r"(resp|msg|fc|call|toolu)_[0-9a-f]{24,32}", lambda it: known.setdefault(it[0], f"id-{len(known)}"), text
    )
    text = re.sub(r'"(created_at|completed_at|cached_tokens|cache_read_input_tokens|input_tokens)":\d+', "0:0", text)
    text = re.sub(r'("message_start".*?"output_tokens":)\d+', r"\1 0", text)  # a ping may open a stream early
    text = re.sub(r',"cohort":\{"requests":\[.*?\}\]\}', "", text)
    assert "cohort" not in text
    return text


def same(ours: Got, theirs: Got) -> None:
    assert ours.done and not ours.failures
    assert ours.ids == list(range(len(ours.ids))), "no gap, no double"
    assert plain(ours.events) == plain(theirs.events)
    if "sequence_number" in ours.events[0]:
        assert [event["sequence_number"] for event in ours.events] == ours.ids


@pytest.mark.parametrize("name", CASES)
async def test_the_rest_of_a_broken_stream(open_site: OpenSite, roomy: Path, name: str) -> None:  # noqa: F811
    case = CASES[name]
    async with case.site(open_site, roomy) as site:
        undisturbed = await whole(site, case)
        got = Got()
        await some(site, got, 3, case)
        for _ in range(3):  # again and again, wherever it breaks
            await some(site, got, 4)
        await rest(site, got)
        same(got, undisturbed)
        again = Got(token=got.token)  # without a place: from the beginning
        await rest(site, again)
        same(again, undisturbed)
        assert [event for event in again.events if event["type"] != "message_start"][:-3] == [
            event for event in got.events if event["type"] != "message_start"
        ][:-3], "the same ids too"
        await eventually(site.nothing_left)


@pytest.mark.parametrize("name", SOME)
async def test_from_every_place_of_a_stream_that_is_over(
    open_site: OpenSite,
    roomy: Path,  # noqa: F811
    name: str,
) -> None:
    case = CASES[name]
    async with case.site(open_site, roomy, step_s=0.0) as site:
        undisturbed = await whole(site, case)
        await eventually(site.nothing_left)
        for seen in range(len(undisturbed.ids)):
            got = Got(undisturbed.token, str(seen), undisturbed.events[: seen + 1], list(range(seen + 1)))
            await rest(site, got)
            same(got, undisturbed)


@pytest.mark.parametrize(
    "name", [*SOME, *(pytest.param(name, marks=another_of_its_kind()) for name in CASES if name not in SOME)]
)
async def test_another_gateway_goes_on(open_site: OpenSite, tmp_path: Path, roomy: Path, name: str) -> None:  # noqa: F811
    """The first one lives: it learns that the stream is no longer its own, and frees everything."""
    case = CASES[name]
    async with case.site(open_site, roomy) as first, case.site(open_site, roomy, instance="other") as second:
        undisturbed = await whole(first, case)
        got = Got()
        first.manager.step_s = 10 * STEP_S  # it is not over before the second one asks
        await some(first, got, 6, case)
        await some(second, got, 3)
        [submitted] = second.manager.submitted
        assert submitted.output_known > 0, "it went on, and did not begin again"
        await rest(second, got)
        same(got, undisturbed)
        await eventually(first.nothing_left)
        await eventually(second.nothing_left)


@pytest.mark.parametrize("name", ["text", "blocks"])
async def test_what_the_disk_refused_before_a_kill_comes_again_unseen(
    open_site: OpenSite,
    tmp_path: Path,
    roomy: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    name: str,
) -> None:
    """The client is further than what was written."""
    case, append, full = CASES[name], ResumeStore.append, False

    def refusing(store: ResumeStore, *args: Any) -> Any:
        if full:
            raise sqlite3.OperationalError("database or disk is full")
        return append(store, *args)

    monkeypatch.setattr(ResumeStore, "append", refusing)
    async with case.site(open_site, roomy) as first:
        undisturbed = await whole(first, case)
        got = Got()
        async with reading(first, got, case) as events:
            for _ in range(5):
                await anext(events)
            full = True
            for _ in range(8):
                await anext(events)
            copy = copied(tmp_path)
        full = False
        async with case.site(open_site, roomy, state=copy) as second:
            await some(second, got, 2)
            await rest(second, got)
        same(got, undisturbed)


@pytest.mark.parametrize("name", ["text", "message"])
async def test_a_place_that_is_none_changes_nothing(open_site: OpenSite, roomy: Path, name: str) -> None:  # noqa: F811
    case = CASES[name]
    async with case.site(open_site, roomy) as site:
        got = Got()
        await some(site, got, 3, case)
        for place in ("x", "1,2", "99999", "-1", "3e", "1e9"):
            status, answer = await site.get(f"/v1/streams/{got.token}", headers={"Last-Event-ID": place})
            assert (status, answer["error"]["param"]) == (400, "Last-Event-ID"), place
        await rest(site, got)
        same(got, await whole(site, case))


@pytest.mark.parametrize("name", ["text", "message"])
async def test_a_gateway_that_shuts_down_leaves_its_streams_to_the_next(
    open_site: OpenSite,
    roomy: Path,  # noqa: F811
    name: str,
) -> None:
    """The failure that says so has no place: what would have had its number comes later."""
    case, got = CASES[name], Got()
    async with case.site(open_site, roomy, step_s=0.05, drain_s=0.05) as first, reading(first, got, case) as events:
        for _ in range(5):
            await anext(events)
        first.context.stopping.set()
        async for _ in events:
            pass
    [failure] = got.failures
    assert "sequence_number" not in failure or failure["sequence_number"] == len(got.ids)
    got.failures.clear()
    async with case.site(open_site, roomy, step_s=0.001) as second:
        await rest(second, got)
        same(got, await whole(second, case))


async def test_a_silent_stream_is_kept_alive_without_places(open_site: OpenSite, roomy: Path) -> None:  # noqa: F811
    case = CASES["message"]
    async with case.site(open_site, roomy) as site:
        undisturbed = await whole(site, case)
        site.gateway._messages.keepalive_s = 0.02
        site.manager.step_s = 0.06
        got = Got()
        await some(site, got, 8, case)
        site.manager.step_s = 0.0
        await some(site, got, 3)
        await rest(site, got)
        assert got.pings > 3
        same(got, undisturbed)


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, ASK), (MESSAGES, SAY)])
async def test_what_cannot_be_kept_is_refused_by_name(site: Site, path: str, body: dict[str, Any]) -> None:
    body = {**body, "model": "tiny"}
    for headers, stream, said in (({"x-cohort-resume": "yes"}, True, "'keep'"), (KEEP, False, "only a stream")):
        status, answer = await site.post(path, {**body, "stream": stream}, headers=headers)
        assert status == 400 and "x-cohort-resume" in answer["error"]["message"] and said in answer["error"]["message"]


# -- What is kept ----------------------------------------------------------------------------------------------------


async def test_a_resumed_response_is_kept_whole_and_gone_on_with(
    open_site: OpenSite,
    tmp_path: Path,
    roomy: Path,  # noqa: F811
) -> None:
    case = CASES["calls"]
    async with case.site(open_site, roomy) as first, case.site(open_site, roomy, instance="other") as second:
        before = (await whole(first, case)).response()
        first.manager.step_s = 10 * STEP_S  # it is not over before the second one asks
        call, got = before["output"][-1], Got()
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "12:00"}
        body = {**case.body, "previous_response_id": before["id"], "input": [output]}
        async with reading(first, got, case, body) as events:
            for _ in range(9):
                await anext(events)
        await rest(second, got)
        response = got.response()
        assert response["previous_response_id"] == before["id"] and response["store"]
        url = f"{RESPONSES}/{response['id']}"
        assert (await second.get(url))[1] == response, "kept where the stream ended"
        assert (await first.get(url))[0] == 404
        _, items = await second.get(f"{url}/input_items", params={"order": "asc"})
        _, asked = await first.get(f"{RESPONSES}/{before['id']}/input_items", params={"order": "asc"})
        assert items["data"][: len(asked["data"])] == asked["data"]
        assert items["data"][-1]["output"] == "12:00" and len(items["data"]) == len(asked["data"]) + 3 + 1
        status, answer = await second.post(RESPONSES, {"input": "And?", "previous_response_id": response["id"]})
        assert status == 200, answer
        assert "12:00" in second.tokenizer.decode(second.manager.submitted[-1].tokens, skip_special=False)


async def test_a_response_is_kept_though_its_client_comes_back_later(open_site: OpenSite, roomy: Path) -> None:  # noqa: F811
    case = CASES["text"]
    async with case.site(open_site, roomy) as site:
        got = Got()
        await some(site, got, 4, case)
        await eventually(site.nothing_left)
        url = f"{RESPONSES}/{got.events[0]['response']['id']}"
        async with asyncio.timeout(5):
            while (await site.get(url))[0] != 200:  # noqa: ASYNC110 -- over HTTP there is no event to wait for
                await asyncio.sleep(0.01)
        await rest(site, got)
        kept = (await site.get(url))[1]
        assert {**got.response(), "cohort": None} == {**kept, "cohort": None}, "but for where and when it was made"
        async with site.session.delete(site.url + url) as response:
            assert response.status == 200
        again = Got(token=got.token)
        await rest(site, again)
        assert again.response()["output"] == got.response()["output"]
        assert (await site.get(url))[0] == 404, "what was deleted does not come back"


async def test_an_end_that_was_not_settled_keeps_a_response_once(open_site: OpenSite, tmp_path: Path) -> None:
    """As kill -9 leaves it between the response that is kept and the stream that is done."""
    case = CASES["text"]
    async with open_site(step_s=0.001) as first:
        got = Got()
        async with reading(first, got, case) as events:
            for _ in range(4):
                await anext(events)
        await eventually(lambda: [state for state, _ in states(tmp_path)] == ["done"])
        with sqlite3.connect(tmp_path / "streams.sqlite3") as database:
            database.execute("UPDATE streams SET state = 'open', ending = NULL")
        await rest(first, got)
        assert got.response()["store"]
        assert (await first.get(f"{RESPONSES}/{got.response()['id']}"))[1]["output"] == got.response()["output"]
        with sqlite3.connect(first.gateway._database()) as database:
            assert database.execute("SELECT count(*) FROM responses").fetchone() == (1,)


async def test_a_response_that_is_not_to_be_stored_is_not(open_site: OpenSite, roomy: Path) -> None:  # noqa: F811
    case = CASES["text"]
    async with case.site(open_site, roomy) as site:
        got = Got()
        async with reading(site, got, case, {**case.body, "store": False}) as events:
            for _ in range(4):
                await anext(events)
        await eventually(site.nothing_left)
        await rest(site, got)
        assert got.done and not got.response()["store"]
        assert (await site.get(f"{RESPONSES}/{got.response()['id']}"))[0] == 404
