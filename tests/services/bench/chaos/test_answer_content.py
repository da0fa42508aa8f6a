"""A whole answer and the stream of it have the same content, in every API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cohort.services.bench.chaos.answer_content import AnswerContent, Api, Reader, StreamFailed, whole


def read(api: Api, events: list[Any]) -> AnswerContent:
    reader = Reader(api)
    for event in events:
        assert not reader.done
        reader.take(event if isinstance(event, str) else json.dumps(event))
    assert reader.done
    return reader.content()


def test_a_completion_of_two_choices() -> None:
    def choice(index: int, text: str, tokens: list[str], end: str | None = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": {"tokens": tokens}, "finish_reason": end}

    body = {"choices": [choice(0, "ab", ["a", "b"], "length"), choice(1, "c", ["c"], "stop")]}
    events = [[choice(1, "c", ["c"])], [choice(0, "a", ["a"])], [choice(0, "b", ["b"], "length")], []]
    streamed = [{"choices": choices} for choices in events]
    streamed.insert(1, {"choices": [choice(1, "", [], "stop")]})
    said = read(Api.COMPLETIONS, [*streamed, "[DONE]"])
    assert said == whole(Api.COMPLETIONS, body)
    assert said == AnswerContent(("ab", "c"), ((), ()), (("a", "b"), ("c",)), ("length", "stop"))


def test_a_chat_that_calls_a_tool() -> None:
    function = {"name": "paint", "arguments": '{"age": 3, "tall": true}'}
    message = {"content": None, "tool_calls": [{"id": "x", "function": function}]}
    body = {"choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}]}

    def delta(call: dict[str, Any], end: str | None = None) -> dict[str, Any]:
        return {"choices": [{"index": 0, "delta": {"tool_calls": [{"index": 0, **call}]}, "finish_reason": end}]}

    first = delta({"id": "y", "function": {"name": "paint", "arguments": ""}})
    later = [delta({"function": {"arguments": part}}) for part in ('{"tall":true,', '"age":3}')]
    ended = {"choices": [{"index": 0, "delta": {}, "finish_reason": "tool_calls"}]}
    said = read(Api.CHAT, [first, *later, ended, "[DONE]"])
    assert said == whole(Api.CHAT, body)
    assert said.calls == ((("paint", '{"age": 3, "tall": true}'),),)


def test_a_response() -> None:
    output = [{"type": "message", "content": [{"type": "output_text", "text": "ab"}]}]
    body = {"status": "completed", "output": output}
    deltas = [{"type": "response.output_text.delta", "delta": part} for part in "ab"]
    assert read(Api.RESPONSES, [*deltas, {"type": "response.completed", "response": body}]) == whole(
        Api.RESPONSES, body
    )
    with pytest.raises(StreamFailed, match="are not the response's text"):
        read(Api.RESPONSES, [deltas[0], {"type": "response.completed", "response": body}])


def test_a_message_of_text_and_a_call() -> None:
    blocks = [{"type": "text", "text": "ab"}, {"type": "tool_use", "name": "paint", "input": {"age": 3}}]
    events = [
        {"type": "message_start"},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "ab"}},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "tool_use", "name": "paint"}},
        {"type": "content_block_delta", "index": 1, "delta": {"type": "input_json_delta", "partial_json": '{"age":3}'}},
        {"type": "message_delta", "delta": {"stop_reason": "tool_use"}},
        {"type": "message_stop"},
    ]
    body = {"content": blocks, "stop_reason": "tool_use"}
    assert read(Api.MESSAGES, events) == whole(Api.MESSAGES, body)


@pytest.mark.parametrize(
    ("api", "event"),
    [
        (Api.CHAT, {"error": {"message": "lost"}}),
        (Api.RESPONSES, {"type": "response.failed", "response": {}}),
        (Api.MESSAGES, {"type": "error", "error": {"message": "lost"}}),
    ],
)
def test_a_stream_that_tells_of_its_failure_fails(api: Api, event: Any) -> None:
    with pytest.raises(StreamFailed):
        Reader(api).take(json.dumps(event))
