"""`/v1/responses` over HTTP with a scripted cluster, and its bodies and answers without one."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.services.gateway.apis.responses_api_bodies import InputItem, _chat_messages, without_oldest
from cohort.services.gateway.apis.responses_api_events import ResponseWriter
from cohort.services.gateway.apis.responses_api_store import ResponseStore
from cohort.services.gateway.generation.choice import Piece
from cohort.services.gateway.http.ignored_fields import IGNORED_HEADER
from cohort.services.gateway.http.request_bodies import most_in_flight
from tests.examples import examples
from tests.services.gateway.conftest import ANSWER, OpenSite, Site, eventually
from tests.services.gateway.named_events import named_stream, parse_named
from tests.services.gateway.test_structured_output import CALLS, accepts, grammar_of, roomy  # noqa: F401
from tests.services.gateway.tiny_model import CONTEXT

PATH = "/v1/responses"
ASK: dict[str, Any] = {"model": "tiny", "input": "Hi"}
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
ROLES = ("user", "assistant")
A, B = {"Authorization": "Bearer key-a"}, {"Authorization": "Bearer key-b"}


def prompt_of(site: Site) -> str:
    return site.tokenizer.decode(site.manager.submitted[-1].tokens, skip_special=False)


# -- Whole answers ---------------------------------------------------------------------------------------------------


async def test_a_response(site: Site) -> None:
    body = {**ASK, "instructions": "Be brief.", "metadata": {"a": "b"}, "temperature": 0.5, "max_output_tokens": 100}
    status, answer = await site.post(PATH, body)
    assert status == 200, answer
    assert prompt_of(site) == ("<|start|>system\nBe brief.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n")
    prompt = len(site.manager.submitted[-1].tokens)
    output = len(site.tokenizer.encode(ANSWER, special_tokens=False)) + 1
    assert answer["id"].startswith("resp_") and answer["object"] == "response" and answer["status"] == "completed"
    [message] = answer["output"]
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": ANSWER, "annotations": [], "logprobs": []}],
    }
    assert answer["usage"] == {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 1, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + output,
    }
    echoed = {key: answer[key] for key in ("instructions", "metadata", "temperature", "max_output_tokens", "model")}
    assert echoed == {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "max_output_tokens": 100,
        "model": "tiny",
    }
    assert (answer["error"], answer["incomplete_details"], answer["store"]) == (None, None, True)
    assert answer["text"] == {"format": {"type": "text"}} and answer["tool_choice"] == "auto"
    assert answer["cohort"]["requests"][0]["attempts"] == 1


async def test_a_response_that_is_cut_off_is_incomplete(site: Site) -> None:
    _, answer = await site.post(PATH, {**ASK, "max_output_tokens": 2})
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert answer["output"][0]["status"] == "incomplete" and answer["completed_at"] is None
    *_, last = await named_stream(site, PATH, {**ASK, "max_output_tokens": 2})
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")


async def test_an_answer_keeps_to_its_format(open_site: OpenSite) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with open_site('{"a": 1}') as site:
        format_ = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
        status, answer = await site.post(PATH, {**ASK, "text": {"format": format_}})
        assert status == 200 and answer["text"]["format"] == format_
        assert accepts(site.tokenizer, grammar_of(site), '{"a": 12}')
        assert not accepts(site.tokenizer, grammar_of(site), '{"a": "12"}')
        status, _ = await site.post(PATH, {**ASK, "text": {"format": {"type": "json_object"}}})
        assert status == 200 and accepts(site.tokenizer, grammar_of(site), '{"b": []}')


async def test_log_probabilities(site: Site) -> None:
    body = {**ASK, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    _, answer = await site.post(PATH, body)
    scores = answer["output"][0]["content"][0]["logprobs"]
    assert len(scores) == answer["usage"]["output_tokens"]
    assert scores[0]["token"] == "The" and len(scores[0]["top_logprobs"]) == 2
    events = await named_stream(site, PATH, body)
    streamed = [each for event in events if event["type"] == "response.output_text.delta" for each in event["logprobs"]]
    assert streamed == scores


async def test_calls_are_items(open_site: OpenSite, roomy: Path) -> None:  # noqa: F811
    async with open_site(CALLS, model=roomy) as site:
        body = {**ASK, "model": "roomy", "tools": [WEATHER, CLOCK]}
        status, answer = await site.post(PATH, body)
        assert status == 200, answer
        text, weather, clock = answer["output"]
        assert text["content"][0]["text"] == "Sure."
        assert (weather["type"], weather["name"], json.loads(weather["arguments"])) == (
            "function_call",
            "weather",
            {"city": "Köln"},
        )
        assert (clock["name"], clock["arguments"], clock["status"]) == ("clock", "{}", "completed")
        assert clock["call_id"] != weather["call_id"] and clock["call_id"].startswith("call_")
        _, answer = await site.post(PATH, {**body, "parallel_tool_calls": False})
        assert [item["type"] for item in answer["output"]] == ["message", "function_call"]
        await site.post(PATH, {**body, "tool_choice": {"type": "function", "name": "clock"}})
        assert "clock" in grammar_of(site) and "weather" not in grammar_of(site)


# -- Streams ---------------------------------------------------------------------------------------------------------


async def test_a_stream(site: Site) -> None:
    events = await named_stream(site, PATH, ASK)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert (events[0]["response"]["status"], events[0]["response"]["output"]) == ("in_progress", [])
    assert "".join(event["delta"] for event in events[4:-4]) == events[-4]["text"] == ANSWER
    response = events[-1]["response"]
    assert response["output"] == [events[-2]["item"]] and events[-2]["item"]["content"] == [events[-3]["part"]]
    assert len({event["item_id"] for event in events[3:-2]}) == 1
    assert response["id"] == events[0]["response"]["id"]
    assert (await site.get(f"{PATH}/{response['id']}"))[1] == response


async def test_a_stream_of_calls(open_site: OpenSite, roomy: Path) -> None:  # noqa: F811
    async with open_site(CALLS, model=roomy) as site:
        events = await named_stream(site, PATH, {**ASK, "model": "roomy", "tools": [WEATHER, CLOCK]})
    added = [event for event in events if event["type"] == "response.output_item.added"]
    done = [event for event in events if event["type"] == "response.output_item.done"]
    assert [event["output_index"] for event in added] == [event["output_index"] for event in done] == [0, 1, 2]
    for begun, ended in zip(added[1:], done[1:], strict=True):
        mine = [event for event in events if event.get("item_id") == begun["item"]["id"]]
        assert begun["item"]["arguments"] == "" and begun["item"]["status"] == "in_progress"
        assert {event["type"] for event in mine} == {
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
        }
        assert "".join(event.get("delta", "") for event in mine) == mine[-1]["arguments"] == ended["item"]["arguments"]
        assert {event["output_index"] for event in mine} == {begun["output_index"]}
    assert events[-1]["response"]["output"] == [event["item"] for event in done]


async def test_a_stream_that_waits_is_opened(open_site: OpenSite) -> None:
    async with open_site() as site:
        site.gateway._responses.keepalive_s = 0.02
        site.manager.place = False
        async with site.session.post(site.url + PATH, json={**ASK, "stream": True}) as response:
            begun = await response.content.readany()
            assert [event["type"] for event in parse_named(begun)] == ["response.created", "response.in_progress"]
        await eventually(site.nothing_left)


async def test_a_failure_in_mid_stream_is_told(open_site: OpenSite, monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_site(step_s=0.01) as site:
        taken = []
        original = ResponseWriter.take

        def breaks(self: ResponseWriter, piece: Piece, logprobs: bytes = b"") -> Any:
            taken.append(piece)
            if len(taken) == 3:
                raise ZeroDivisionError("secret")
            return original(self, piece, logprobs)

        monkeypatch.setattr(ResponseWriter, "take", breaks)
        events = await named_stream(site, PATH, ASK)
        failed = events[-1]
        assert failed["type"] == "response.failed" and "secret" not in str(failed)
        assert (failed["response"]["status"], failed["response"]["error"]["code"]) == ("failed", "server_error")
        assert failed["sequence_number"] == len(events) - 1
        assert (await site.get(f"{PATH}/{failed['response']['id']}"))[0] == 404
        await eventually(site.nothing_left)


# -- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"temperature": 9}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 10_000}, "max_output_tokens"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"reasoning": {"effort": 7}}, "reasoning.effort"),
        ({"truncation": "last"}, "truncation"),
        ({"conversation": "c"}, "conversation"),
        ({"include": ["surprise"]}, "include[0]"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "nope"}}}}, "text.format.schema"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "no name"}]}, "tools[0].name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ],
)
async def test_what_is_wrong_is_named(site: Site, change: dict[str, Any], param: str) -> None:
    body = {key: value for key, value in {**ASK, **change}.items() if value is not None}
    status, answer = await site.post(PATH, body)
    assert (status, answer["error"]["param"]) == (400, param), answer
    assert answer["error"]["type"] == "invalid_request_error"
    assert site.manager.submitted == []


async def test_tools_that_other_servers_run_are_left_out_and_named(site: Site) -> None:
    tools = [{"type": "web_search"}, {"type": "namespace", "name": "agents", "tools": [CLOCK]}]
    async with site.session.post(site.url + PATH, json={**ASK, "tools": tools}) as response:
        assert response.status == 200, await response.text()
        ignored = response.headers[IGNORED_HEADER].split(", ")
        assert {"tools.web_search", "tools.namespace"} <= set(ignored)


@pytest.mark.parametrize("data", [b"", b"[", b"null", b'{"a": "\xff"}', b"[" * 5000, b'{"input": 7}'])
async def test_bodies_that_are_none(site: Site, data: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with asyncio.timeout(10), site.session.post(site.url + PATH, data=data, headers=headers) as response:
        assert response.status in (400, 415)
        assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_what_asks_for_nothing_is_taken(site: Site) -> None:
    nothing = {
        "background": False,
        "reasoning": {"effort": None, "summary": None},
        "truncation": "disabled",
        "include": ["reasoning.encrypted_content"],
        "service_tier": "auto",
        "user": "u",
        "stream_options": {"include_obfuscation": False},
    }
    status, answer = await site.post(PATH, {**ASK, **nothing})
    assert status == 200, answer


# -- Conversations ---------------------------------------------------------------------------------------------------


async def test_a_conversation_goes_on(site: Site) -> None:
    _, first = await site.post(PATH, {**ASK, "instructions": "Be brief."})
    status, second = await site.post(
        PATH, {"model": "tiny", "input": "More", "previous_response_id": first["id"], "instructions": "Sing."}
    )
    assert status == 200 and second["previous_response_id"] == first["id"]
    assert prompt_of(site) == (
        f"<|start|>system\nSing.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n{ANSWER}<|end|>\n"
        "<|start|>user\nMore<|end|>\n<|start|>assistant\n"
    )
    _, third = await site.post(PATH, {"model": "tiny", "input": "Last", "previous_response_id": second["id"]})
    assert prompt_of(site).count(ANSWER) == 2 and "Sing" not in prompt_of(site)
    _, page = await site.get(f"{PATH}/{third['id']}/input_items?order=asc")
    assert [(item["role"], item["content"][0]["text"]) for item in page["data"]] == [
        ("user", "Hi"),
        ("assistant", ANSWER),
        ("user", "More"),
        ("assistant", ANSWER),
        ("user", "Last"),
    ]
    assert page["data"][1]["id"] == first["output"][0]["id"] and not page["has_more"]
    _, newest = await site.get(f"{PATH}/{third['id']}/input_items?limit=2")
    assert [item["content"][0]["text"] for item in newest["data"]] == ["Last", ANSWER] and newest["has_more"]
    _, rest = await site.get(f"{PATH}/{third['id']}/input_items?after={newest['last_id']}")
    assert [item["content"][0]["text"] for item in rest["data"]] == ["More", ANSWER, "Hi"]
    # The rest goes on although its beginning is gone.
    assert (await site.session.delete(f"{site.url}{PATH}/{first['id']}")).status == 200
    assert (await site.post(PATH, {**ASK, "previous_response_id": second["id"]}))[0] == 200


async def test_calls_and_their_results_go_on(open_site: OpenSite, roomy: Path) -> None:  # noqa: F811
    async with open_site(CALLS, model=roomy) as site:
        _, first = await site.post(PATH, {**ASK, "model": "roomy", "tools": [WEATHER, CLOCK]})
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"}
            for item in first["output"]
            if item["type"] == "function_call"
        ]
        status, _ = await site.post(PATH, {"model": "roomy", "input": outputs, "previous_response_id": first["id"]})
        assert status == 200
        said = prompt_of(site)
        assert said.count("<tool_call>") == 2 and said.count("<tool_response>\nsunny\n</tool_response>") == 2
        # The same without the server's memory.
        items = [{"role": "user", "content": "Hi"}, *first["output"], *outputs]
        status, _ = await site.post(PATH, {"model": "roomy", "input": items, "store": False})
        assert status == 200 and prompt_of(site) == said


async def test_a_conversation_beyond_the_context_loses_its_oldest_turns(site: Site) -> None:
    turns = [{"role": role, "content": f"{role} {index} " + "word " * 20} for index in range(9) for role in ROLES]
    body = {"model": "tiny", "instructions": "Be brief.", "input": [*turns, {"role": "user", "content": "Hi"}]}
    status, refused = await site.post(PATH, {**body, "max_output_tokens": 100})
    assert (status, refused["error"]["param"]) == (400, "input") and "512" in refused["error"]["message"]
    status, answer = await site.post(PATH, {**body, "max_output_tokens": 100, "truncation": "auto"})
    assert (status, answer["truncation"]) == (200, "auto")
    said = prompt_of(site)
    assert said.startswith("<|start|>system\nBe brief.<|end|>\n<|start|>user\nuser ")
    first = int(said.split("<|start|>user\nuser ")[1].split()[0])
    assert first > 0 and said.endswith("<|start|>user\nHi<|end|>\n<|start|>assistant\n")
    used = len(site.manager.submitted[-1].tokens)
    turn = "".join(f"<|start|>{role}\n{role} 0 {'word ' * 20}<|end|>\n" for role in ROLES)
    assert used <= CONTEXT - 100 < used + len(site.tokenizer.encode(turn, special_tokens=False))
    long = [{"role": "user", "content": "x" * 20_000}]
    assert (await site.post(PATH, {**body, "input": [*turns, *long], "truncation": "auto"}))[0] == 400


@settings(max_examples=examples(2))
@given(
    st.lists(st.sampled_from(["system", "developer", "user", "assistant", "call", "result"]), max_size=12), st.data()
)
def test_items_lose_the_messages_that_the_chat_loses(kinds: list[str], data: st.DataObject) -> None:
    fields: dict[str, Any] = {"call": {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}}
    fields["result"] = {"type": "function_call_output", "call_id": "c", "output": "o"}
    given_items = [
        InputItem(id=str(place), **fields.get(kind, {"role": kind, "content": f"text {place}"}))
        for place, kind in enumerate(kinds)
    ]
    messages = list(_chat_messages(given_items))
    head = len(list(takewhile(lambda message: message["role"] == "system", messages)))
    starts = [place for place in range(head, len(messages)) if messages[place]["role"] in ("user", "tool")]
    dropped = data.draw(st.sampled_from([head, *starts])) - head
    left = without_oldest(given_items, dropped)
    assert list(_chat_messages(left)) == [*messages[:head], *messages[head + dropped :]]
    assert left == [item for item in given_items if item in left]


async def test_what_truncation_drops_is_not_kept_and_a_conversation_goes_on_as_if_it_were(site: Site) -> None:
    """Turn by turn, with the same prompts as a client that sends all of it each time."""
    options = {"model": "tiny", "instructions": "Be brief.", "max_output_tokens": 100, "truncation": "auto"}
    every: list[dict[str, Any]] = [{"role": "developer", "content": "Sing."}]
    own, before, sizes = list(every), None, []
    for index in range(9):
        turn = {"role": "user", "content": f"turn {index} " + "word " * 20}
        every, own = [*every, turn], [*own, turn]
        _, answer = await site.post(PATH, {**options, "input": own, "previous_response_id": before})
        prompt = prompt_of(site)
        await site.post(PATH, {**options, "input": every, "store": False})
        assert prompt_of(site) == prompt
        before, own, every = answer["id"], [], [*every, *answer["output"]]
        _, page = await site.get(f"{PATH}/{before}/input_items?order=asc&limit=100")
        texts = [item["content"][0]["text"] for item in page["data"]]
        assert texts[0] == "Sing." and all(text in prompt for text in texts)
        assert prompt.count("<|start|>") == len(texts) + 2  # the instructions, the answer
        sizes.append(len(texts))
    assert sizes[:3] == [2, 4, 6] and max(sizes) < 14, "the oldest are gone"


async def test_a_conversation_longer_than_a_body_may_be_is_refused(open_site: OpenSite) -> None:
    async with open_site(max_body_bytes=1500) as site:
        before, status, answer = None, 200, {}
        while status == 200:
            status, answer = await site.post(PATH, {**ASK, "input": "x" * 90, "previous_response_id": before})
            before = answer["id"] if status == 200 else before
        error = answer["error"]
        assert (status, error["param"]) == (400, "previous_response_id")
        assert "1500" in error["message"] and "gateway.max_body_bytes" in error["message"]
        [size] = [int(word) for word in error["message"].split() if word.isdigit() and word != "1500"]
        assert 1500 < size < 2000
        _, page = await site.get(f"{PATH}/{before}/input_items?order=asc")
        assert len(json.dumps(page["data"])) < 1500 * 1.2
        # Without an earlier one the body's limit holds; its items, longer than it, are not kept.
        status, answer = await site.post(PATH, {**ASK, "input": [{"role": "user", "content": "x"}] * 20})
        assert (status, answer["store"]) == (200, False)


async def test_what_is_read_from_the_store_is_charged_before_and_given_back(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversation until its request is accepted, an answer or a page of items while it is read."""
    turns = [{"role": role, "content": f"{role} {index}"} for index in range(6) for role in ROLES]
    _, answer = await site.post(PATH, {**ASK, "input": turns})
    bodies, path = site.gateway.generator.bodies, f"{PATH}/{answer['id']}"
    seen: list[tuple[str, int, int]] = []

    def noted(name: str, length: Callable[[Any], int]) -> None:
        original = getattr(ResponseStore, name)

        def read(self: ResponseStore, *args: Any) -> Any:
            found = original(self, *args)
            seen.append((name, length(found), bodies.in_flight_bytes))
            return found

        monkeypatch.setattr(ResponseStore, name, read)

    noted("get", lambda row: row.bytes)
    noted("answer", len)
    noted("items", lambda items: sum(map(len, items)))
    for tail in ("", "/input_items?limit=1", "/input_items?limit=2&order=asc"):
        assert (await site.get(path + tail))[0] == 200
    body = {**ASK, "previous_response_id": answer["id"]}
    assert (await site.post(PATH, body))[0] == 200
    assert [name for name, _, _ in seen] == ["answer", "items", "items", "get"]
    assert all(held == length for _, length, held in seen[:3])
    assert 0 < seen[1][1] < seen[2][1] < 400 < seen[3][1], "a page is not the whole"
    assert seen[3][2] == seen[3][1] + len(json.dumps(body)) and bodies.in_flight_bytes == 0
    # The budget is full: nothing is read.
    seen.clear()
    with bodies.holding() as take:
        take(most_in_flight(bodies._config) - len(json.dumps(body)) - 1)
        for tail in ("", "/input_items"):
            async with site.session.get(site.url + path + tail) as response:
                assert response.status == 429 and response.headers["Retry-After"] == "1"
        async with site.session.post(site.url + PATH, json=body) as response:
            assert response.status == 429 and response.headers["Retry-After"] == "1"
        assert seen == []
    assert bodies.in_flight_bytes == 0 and (await site.post(PATH, body))[0] == 200


async def test_what_is_not_stored_is_not_there(site: Site) -> None:
    _, answer = await site.post(PATH, {**ASK, "store": False})
    assert answer["store"] is False
    for path in ("", "/input_items"):
        assert (await site.get(f"{PATH}/{answer['id']}{path}"))[0] == 404
    status, refused = await site.post(PATH, {**ASK, "previous_response_id": answer["id"]})
    assert (status, refused["error"]["param"]) == (404, "previous_response_id")


async def test_a_server_may_keep_none(open_site: OpenSite) -> None:
    async with open_site(responses={"storage_bytes": 0}) as site:
        status, answer = await site.post(PATH, ASK)
        assert (status, answer["store"]) == (200, False)
        status, refused = await site.post(PATH, {**ASK, "store": True})
        assert (status, refused["error"]["param"]) == (400, "store")
        assert (await site.get(f"{PATH}/{answer['id']}"))[0] == 404
        assert (await site.post(PATH, {**ASK, "previous_response_id": answer["id"]}))[0] == 404


async def test_what_is_too_large_to_keep_is_answered_all_the_same(open_site: OpenSite) -> None:
    async with open_site(responses={"storage_bytes": 100}) as site:
        *_, last = await named_stream(site, PATH, ASK)
        assert (last["type"], last["response"]["store"]) == ("response.completed", False)


async def test_a_response_is_read_deleted_and_not_cancelled(site: Site) -> None:
    _, answer = await site.post(PATH, ASK)
    path = f"{PATH}/{answer['id']}"
    assert await site.get(path) == (200, answer)
    assert (await site.get(path + "?stream=true"))[0] == 400
    async with site.session.post(f"{site.url}{path}/cancel") as response:
        assert response.status == 400 and "background" in (await response.json())["error"]["message"]
    async with site.session.delete(site.url + path) as response:
        assert (response.status, await response.json()) == (
            200,
            {"id": answer["id"], "object": "response", "deleted": True},
        )
    async with site.session.delete(site.url + path) as response:
        assert response.status == 404
    assert (await site.get(path))[0] == 404
    assert (await site.get(f"{PATH}/%ED%A0%80/input_items"))[0] == 404


async def test_a_response_belongs_to_its_key(open_site: OpenSite) -> None:
    async with open_site(api_keys=("key-a", "key-b")) as site:
        _, answer = await site.post(PATH, ASK, headers=A)
        path = f"{PATH}/{answer['id']}"
        for tail in ("", "/input_items"):
            assert (await site.get(path + tail, headers=A))[0] == 200
            assert (await site.get(path + tail, headers=B))[0] == 404
        assert (await site.session.delete(site.url + path, headers=B)).status == 404
        assert (await site.session.post(f"{site.url}{path}/cancel", headers=B)).status == 404
        after = {**ASK, "previous_response_id": answer["id"]}
        assert (await site.post(PATH, after, headers=B))[0] == 404
        assert (await site.post(PATH, after, headers=A))[0] == 200


async def test_responses_survive_a_restart_in_private_files(open_site: OpenSite, tmp_path: Path) -> None:
    async with open_site() as site:
        _, answer = await site.post(PATH, ASK)
    files = sorted((tmp_path / "batches" / "0").glob("responses.sqlite*"))
    assert files and all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    async with open_site() as site:
        assert await site.get(f"{PATH}/{answer['id']}") == (200, answer)


async def test_a_conversation_that_one_gateway_began_goes_on_at_the_other(open_site: OpenSite) -> None:
    async with open_site(processes=2) as here, open_site(processes=2) as there:
        _, first = await here.post(PATH, ASK)
        status, second = await there.post(PATH, {**ASK, "input": "And?", "previous_response_id": first["id"]})
        assert status == 200 and ANSWER in prompt_of(there)
        assert await there.get(f"{PATH}/{first['id']}") == (200, first)
        status, _ = await here.post(PATH, {**ASK, "input": "So?", "previous_response_id": second["id"]})
        assert status == 200 and prompt_of(here).count(ANSWER) == 2
        assert (await here.session.delete(f"{here.url}{PATH}/{second['id']}")).status == 200
        assert (await there.get(f"{PATH}/{second['id']}"))[0] == 404


async def test_a_broken_database_costs_the_memory_alone(open_site: OpenSite, tmp_path: Path) -> None:
    (folder := tmp_path / "batches" / "0").mkdir(parents=True)
    (folder / "responses.sqlite").write_bytes(b"no database" * 1000)
    async with open_site() as site:
        status, answer = await site.post(PATH, ASK)
        assert (status, answer["store"]) == (200, False)
        assert (await site.get(f"{PATH}/{answer['id']}"))[0] == 503
        assert (await site.post(PATH, {**ASK, "previous_response_id": "resp_1"}))[0] == 503
