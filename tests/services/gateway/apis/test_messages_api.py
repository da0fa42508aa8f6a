"""`/v1/messages` over HTTP with a scripted cluster, and its bodies and answers without one."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cohort.common.types import FinishReason
from cohort.services.gateway.apis.messages_api_bodies import MessagesBody, chat_of
from cohort.services.gateway.apis.messages_api_events import MessageWriter, TextBlock, ToolUseBlock
from cohort.services.gateway.generation.answer_parts import CallDelta
from cohort.services.gateway.generation.choice import Piece
from cohort.services.gateway.generation.openai_shapes import usage_of
from tests.services.gateway.conftest import ANSWER, OpenSite, Site, eventually
from tests.services.gateway.named_events import named_stream, parse_named
from tests.services.gateway.test_structured_output import CALLS, roomy  # noqa: F401
from tests.services.gateway.tiny_model import CONTEXT

PATH, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "Hi"}]
ASK: dict[str, Any] = {"model": "tiny", "max_tokens": 100, "messages": HI}
WEATHER = {
    "name": "weather",
    "description": "of a city",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALLED = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}
CLOCK = {"name": "clock", "input_schema": {"type": "object", "properties": {}}}


def chat(**more: Any) -> Any:
    """The chat that a body says, as builtins without what it leaves open."""
    body = msgspec.convert({**ASK, **more}, MessagesBody)
    return {key: value for key, value in msgspec.to_builtins(chat_of(body)).items() if value is not None}


# -- Whole answers ---------------------------------------------------------------------------------------------------


async def test_a_message(site: Site) -> None:
    status, answer = await site.post(PATH, {**ASK, "system": "Be brief."}, headers={"anthropic-version": "2023-06-01"})
    assert status == 200, answer
    prompt = "<|start|>system\nBe brief.<|end|>\n<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    [submitted] = site.manager.submitted
    assert submitted.tokens == site.tokenizer.encode(prompt, special_tokens=False)
    assert submitted.sampling.max_tokens == 100
    assert answer.pop("id").startswith("msg_") and answer.pop("cohort")["requests"][0]["attempts"] == 1
    assert answer == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": ANSWER}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": len(submitted.tokens) - 1,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": len(site.tokenizer.encode(ANSWER, special_tokens=False)) + 1,
        },
    }


async def test_why_an_answer_stopped(site: Site) -> None:
    _, answer = await site.post(PATH, {**ASK, "max_tokens": 2})
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("max_tokens", 2)
    _, answer = await site.post(PATH, {**ASK, "stop_sequences": ["never", " fox"]})
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " fox")
    assert answer["content"] == [{"type": "text", "text": "The quick brown"}]


async def test_calls_are_blocks(open_site: OpenSite, roomy: Path) -> None:  # noqa: F811
    async with open_site(CALLS, model=roomy) as site:
        body = {**ASK, "model": "roomy", "max_tokens": 400, "tools": [WEATHER, CLOCK]}
        status, answer = await site.post(PATH, body)
        assert status == 200, answer
        text, weather, clock = answer["content"]
        assert text == {"type": "text", "text": "Sure."} and answer["stop_reason"] == "tool_use"
        assert (weather["type"], weather["name"], weather["input"]) == ("tool_use", "weather", {"city": "Köln"})
        assert (clock["name"], clock["input"]) == ("clock", {}) and clock["id"] != weather["id"]
        _, answer = await site.post(PATH, {**body, "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}})
        assert [block["type"] for block in answer["content"]] == ["text", "tool_use"]
        _, answer = await site.post(PATH, {**body, "tool_choice": {"type": "none"}})
        assert [block["type"] for block in answer["content"]] == ["text"] and answer["stop_reason"] == "end_turn"


async def test_a_choice_of_tools_binds_the_answer(open_site: OpenSite, roomy: Path) -> None:  # noqa: F811
    async with open_site("x", model=roomy) as site:
        body = {**ASK, "model": "roomy", "tools": [WEATHER, CLOCK]}
        for choice, names in (({"type": "any"}, ["weather", "clock"]), ({"type": "tool", "name": "clock"}, ["clock"])):
            status, answer = await site.post(PATH, {**body, "tool_choice": choice})
            assert status == 200, answer
            grammar = site.manager.submitted[-1].sampling.grammar
            assert [name for name in ("weather", "clock") if name in grammar] == names


# -- Streams ---------------------------------------------------------------------------------------------------------


async def test_a_stream(site: Site) -> None:
    events = await named_stream(site, PATH, ASK)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "content_block_start", "ping"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(kinds[3:-3]) == {"content_block_delta"}
    start = events[0]["message"]
    assert (start["content"], start["stop_reason"], start["role"]) == ([], None, "assistant")
    assert events[1]["content_block"] == {"type": "text", "text": ""}
    assert "".join(event["delta"]["text"] for event in events[3:-3]) == ANSWER
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    _, whole = await site.post(PATH, ASK)
    assert events[-2]["usage"] == whole["usage"]
    assert start["usage"]["input_tokens"] + start["usage"]["cache_read_input_tokens"] == sum(
        whole["usage"][key] for key in ("input_tokens", "cache_read_input_tokens")
    )


async def test_a_stream_of_calls(open_site: OpenSite, roomy: Path) -> None:  # noqa: F811
    async with open_site(CALLS, model=roomy) as site:
        events = await named_stream(site, PATH, {**ASK, "model": "roomy", "max_tokens": 400, "tools": [WEATHER, CLOCK]})
    blocks: dict[int, list[Any]] = {}
    open_block = -1
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_block == -1
                open_block = event["index"]
                blocks[open_block] = [event["content_block"], ""]
            case "content_block_delta":
                assert event["index"] == open_block
                delta = event["delta"]
                blocks[open_block][1] += delta["text"] if delta["type"] == "text_delta" else delta["partial_json"]
            case "content_block_stop":
                assert event["index"] == open_block
                open_block = -1
    assert list(blocks) == [0, 1, 2] and open_block == -1
    assert blocks[0][1] == "Sure."
    assert [(block["name"], json.loads(text)) for block, text in (blocks[1], blocks[2])] == [
        ("weather", {"city": "Köln"}),
        ("clock", {}),
    ]
    assert all(block["input"] == {} for block, _ in (blocks[1], blocks[2]))
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_a_stream_that_waits_is_kept_alive(open_site: OpenSite) -> None:
    async with open_site() as site:
        site.gateway._messages.keepalive_s = 0.02
        site.manager.place = False
        async with site.session.post(site.url + PATH, json={**ASK, "stream": True}) as response:
            begun = b""
            while begun.count(b"event: ping") < 2:
                begun += await response.content.readany()
            assert [event["type"] for event in parse_named(begun)][:2] == ["message_start", "ping"]
        await eventually(site.nothing_left)


async def test_a_failure_in_mid_stream_is_an_event_of_its_own(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_site(step_s=0.01) as site:
        taken = []
        original = MessageWriter.take

        def breaks(self: MessageWriter, piece: Piece) -> Any:
            taken.append(piece)
            if len(taken) == 3:
                raise ZeroDivisionError("secret")
            return original(self, piece)

        monkeypatch.setattr(MessageWriter, "take", breaks)
        *_, error = await named_stream(site, PATH, ASK)
        assert error["error"]["type"] == "api_error" and "secret" not in str(error)
        await eventually(site.nothing_left)


# -- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        (
            {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f"}]}]},
            "messages: the last message ends with calls",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "content[0].tool_use_id"),
        ({"temperature": 9}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"thinking": {"budget_tokens": 2000}}, "thinking.type"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "x"}]}, "tools[0].input_schema"),
        ({"tools": [{"name": "no name", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [CLOCK], "tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
        ({"stop_sequences": ["x" * 300]}, "stop_sequences"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "nope"}}}}, "output_config.format"),
        ({"max_tokens": 10_000}, str(CONTEXT)),
    ],
)
async def test_what_is_wrong_is_said_in_anthropics_shape(site: Site, change: dict[str, Any], words: str) -> None:
    body = {key: value for key, value in {**ASK, **change}.items() if value is not None}
    status, answer = await site.post(PATH, body)
    assert (status, answer["type"], answer["error"]["type"]) == (400, "error", "invalid_request_error")
    assert words in answer["error"]["message"]
    assert set(answer) == {"type", "error"} and set(answer["error"]) == {"type", "message"}
    assert site.manager.submitted == []


@pytest.mark.parametrize("data", [b"", b"[", b"null", b'{"a": "\xff"}', b"[" * 5000, b'{"messages": 7}'])
@pytest.mark.parametrize("path", [PATH, COUNT])
async def test_bodies_that_are_none(site: Site, path: str, data: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    async with asyncio.timeout(10), site.session.post(site.url + path, data=data, headers=headers) as response:
        answer = await response.json()
        assert response.status in (400, 415) and answer["type"] == "error"
        assert answer["error"]["type"] == "invalid_request_error"


async def test_other_errors_have_the_shape_too(open_site: OpenSite) -> None:
    async with open_site(api_keys=("k",), max_body_bytes=2000) as site:
        key = {"x-api-key": "k"}
        for headers, change, status, kind in (
            ({}, {}, 401, "authentication_error"),
            ({"x-api-key": "other"}, {}, 401, "authentication_error"),
            (key, {"model": "claude"}, 404, "not_found_error"),
            (key, {"system": "x" * 3000}, 413, "request_too_large"),
        ):
            got, answer = await site.post(PATH, {**ASK, **change}, headers=headers)
            assert (got, answer["error"]["type"]) == (status, kind)
        got, answer = await site.get(PATH + "/nowhere", headers=key)
        assert (got, answer["error"]["type"]) == (404, "not_found_error")
        got, answer = await site.get("/v1/nowhere", headers=key)
        assert (got, answer["error"]["code"]) == (404, "404")  # beside it, OpenAI's
        assert (await site.post(PATH, ASK, headers=key))[0] == 200
        assert (await site.post(PATH, ASK, headers={"Authorization": "Bearer k"}))[0] == 200
        both = {"Authorization": "Bearer other", "x-api-key": "k"}
        assert (await site.post(PATH, ASK, headers=both))[0] == 401


async def test_a_busy_server_says_when_to_come_back(open_site: OpenSite) -> None:
    async with open_site(max_waiting_requests=1) as site:
        site.manager.place = False
        first = asyncio.create_task(site.post(PATH, ASK))
        await eventually(lambda: bool(site.manager.submitted))
        async with site.session.post(site.url + PATH, json=ASK) as response:
            assert response.status == 429 and int(response.headers["Retry-After"]) >= 1
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await eventually(site.nothing_left)


# -- Counting --------------------------------------------------------------------------------------------------------


async def test_counted_tokens_are_those_of_the_prompt(open_site: OpenSite, roomy: Path) -> None:  # noqa: F811
    async with open_site("x", model=roomy) as site:
        for more in ({}, {"system": [{"type": "text", "text": "Be brief."}]}, {"tools": [WEATHER]}):
            status, counted = await site.post(COUNT, {"model": "roomy", "messages": HI, **more})
            assert status == 200, counted
            await site.post(PATH, {**ASK, "model": "roomy", **more})
            assert counted == {"input_tokens": len(site.manager.submitted[-1].tokens)}
        assert (await site.post(COUNT, {"model": "roomy", "messages": HI, "max_tokens": 0}))[0] == 200, "not its field"


# -- Bodies as chats -------------------------------------------------------------------------------------------------


def test_a_chat_with_calls_and_results() -> None:
    messages = [
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "Let me look."},
                {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Köln"}},
                {"type": "tool_use", "id": "t2", "name": "clock", "input": {}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no clock", "is_error": True},
                {"type": "text", "text": "And now?", "cache_control": {"type": "ephemeral"}},
            ],
        },
        {"role": "user", "content": "Please."},
    ]
    said = chat(messages=messages, system=[{"type": "text", "text": "a"}, {"type": "text", "text": "b"}])
    assert said["messages"] == [
        {"role": "system", "content": "a\nb"},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": "Let me look.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Köln"}}},
                {"id": "t2", "type": "function", "function": {"name": "clock", "arguments": {}}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "t2", "content": "Error: no clock"},
        {"role": "user", "content": "And now?\nPlease."},
    ]


def test_the_fields_of_a_body_are_those_of_a_chat() -> None:
    said = chat(stop_sequences=["x"], temperature=0.5, top_p=0.9, top_k=7, stream=True, metadata={"user_id": "u"})
    assert {key: said[key] for key in ("max_tokens", "stop", "temperature", "top_p", "top_k", "stream")} == {
        "max_tokens": 100,
        "stop": ["x"],
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "stream": True,
    }
    format_ = {"type": "json_schema", "schema": {"type": "object"}}
    assert chat(output_config={"format": format_})["response_format"]["json_schema"]["schema"] == {"type": "object"}


# -- Answers without a gateway ---------------------------------------------------------------------------------------


def write(*pieces: Piece, finish: FinishReason = FinishReason.STOP) -> tuple[list[Any], Any]:
    writer = MessageWriter("msg_1", "m")
    usage = usage_of(5, 3, 2)
    events = list(writer.begin(usage))
    for piece in pieces:
        events += writer.take(piece)
    assert not list(writer.begin(usage))
    events += writer.end(finish, None, usage)
    return events, writer.message(finish, None, usage)


def piece(text: str = "", *calls: CallDelta) -> Piece:
    begun = [call for call in calls if not call.id]  # more of a call comes before any text behind it
    parts = [*begun, *([text] if text else []), *(call for call in calls if call.id)]
    return Piece(text, (), stopped=False, parts=parts, called=bool(calls))


def test_an_answer_without_a_word_has_no_blocks() -> None:
    events, message = write()
    assert [type(event).__name__ for event in events] == ["MessageStart", "MessageDelta", "MessageStop"]
    assert message.content == [] and message.stop_reason == "end_turn"


def test_the_end_of_a_call_comes_before_the_text_behind_it() -> None:
    _, message = write(
        piece("", CallDelta(0, "c1", "f", '{"x": ')), piece("and", CallDelta(0, arguments="1}")), piece(" so on")
    )
    assert message.content == [ToolUseBlock("toolu_c1", "f", {"x": 1}), TextBlock("and so on")]


def test_arguments_that_were_cut_off_are_no_call() -> None:
    cut = piece("", CallDelta(0, "c1", "f", '{"x": "lo'))
    _, message = write(cut, finish=FinishReason.LENGTH)
    assert message.content == [TextBlock('f {"x": "lo')] and message.stop_reason == "max_tokens"
    _, message = write(cut)
    assert message.stop_reason == "end_turn"
