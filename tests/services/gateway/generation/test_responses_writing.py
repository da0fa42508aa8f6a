"""Bodies of `/v1/responses` as chats, and answers as their events, without a gateway."""

from __future__ import annotations

from typing import Any

import msgspec

from cohort.common.errors import RequestError
from cohort.common.types import FinishReason
from cohort.services.gateway.apis.responses_api_bodies import ResponsesBody, chat_of, items_of
from cohort.services.gateway.apis.responses_api_events import ResponseWriter, pending_response
from cohort.services.gateway.generation.answer_parts import CallDelta
from cohort.services.gateway.generation.choice import Piece
from cohort.services.gateway.generation.openai_shapes import usage_of

ASK: dict[str, Any] = {"model": "tiny", "input": "Hi"}


def messages(**more: Any) -> Any:
    body = msgspec.convert({**ASK, **more}, ResponsesBody)
    return chat_of(body, items_of(body)).messages


# -- Bodies as chats -------------------------------------------------------------------------------------------------


def test_items_become_messages() -> None:
    items = [
        {"type": "message", "role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "c", "annotations": []}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "g", "arguments": '{"x": 1}'},
        {"type": "function_call_output", "call_id": "c1", "output": "one"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
    ]
    assert messages(input=items, instructions="First.") == [
        {"role": "system", "content": "First."},
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "a\nb"},
        {
            "role": "assistant",
            "content": "c",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "c2", "type": "function", "function": {"name": "g", "arguments": '{"x": 1}'}},
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "one"},
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
    ]


# -- Answers without a gateway ---------------------------------------------------------------------------------------


def writer() -> ResponseWriter:
    body = msgspec.convert(ASK, ResponsesBody)
    return ResponseWriter(
        pending_response(body, response_id="resp_1", created_at=1, model="m", store=True, temperature=1.0, top_p=1.0)
    )


def builtins(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


def piece(text: str = "", *calls: CallDelta) -> Piece:
    begun = [call for call in calls if not call.id]  # more of a call comes before any text behind it
    parts = [*begun, *([text] if text else []), *(call for call in calls if call.id)]
    return Piece(text, (), stopped=False, parts=parts, called=bool(calls))


def output(writer: ResponseWriter, finish: FinishReason = FinishReason.STOP) -> Any:
    list(writer.close(finish))
    return builtins(writer.response(finish, usage_of(1, 1, 0), 2).output)


def test_an_answer_without_a_word_is_an_empty_message() -> None:
    [item] = output(writer())
    assert (item["type"], item["content"][0]["text"]) == ("message", "")


def test_the_end_of_a_call_comes_before_the_text_behind_it() -> None:
    answer = writer()
    for part in (
        piece("", CallDelta(0, "c1", "f", '{"x": ')),
        piece("and", CallDelta(0, arguments="1}")),
        piece(" so on"),
    ):
        list(answer.take(part))
    call, text = output(answer)
    assert (call["arguments"], call["call_id"], text["content"][0]["text"]) == ('{"x": 1}', "c1", "and so on")


def test_a_call_that_is_cut_off_is_incomplete() -> None:
    answer = writer()
    list(answer.take(piece("", CallDelta(0, "c1", "f", '{"x": '))))
    [call] = output(answer, FinishReason.LENGTH)
    assert (call["arguments"], call["status"]) == ('{"x": ', "incomplete")


def test_what_failed_says_why() -> None:
    answer = writer()
    list(answer.begin())
    list(answer.take(piece("Hel")))
    event = builtins(answer.failed(RequestError("no worker", status=429)))
    assert event["response"]["error"] == {"code": "rate_limit_exceeded", "message": "no worker"}
    assert event["response"]["output"][0]["status"] == "incomplete"
