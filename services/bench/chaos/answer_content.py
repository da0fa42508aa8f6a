"""The content of an answer without its ids, times and usage: equal for a whole answer and a stream of it.

`whole` reads a body, `Reader` the events of a stream, of all four APIs. Pure; called by `exchange`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, assert_never


class Api(StrEnum):
    """Form of an answer; the value is the path."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


@dataclass(frozen=True, slots=True)
class AnswerContent:
    """Answer by choice: its text, its calls as (name, arguments as canonical JSON), the scored tokens, its end."""

    texts: tuple[str, ...]
    calls: tuple[tuple[tuple[str, str], ...], ...]
    scored: tuple[tuple[str, ...], ...]
    ends: tuple[str, ...]


class StreamFailed(Exception):
    """The stream said that it failed; the message is the error's."""


@dataclass(slots=True)
class _Choice:
    text: str = ""
    calls: dict[int, list[str]] = field(default_factory=dict)
    scored: list[str] = field(default_factory=list)
    end: str = ""

    def call(self, index: int) -> list[str]:
        return self.calls.setdefault(index, ["", ""])


def whole(api: Api, body: Any) -> AnswerContent:
    """Read an answer that was not streamed. Raises `KeyError`, `TypeError` or `StreamFailed` for one that is none."""
    match api:
        case Api.COMPLETIONS | Api.CHAT:
            choices = {choice["index"]: _openai(choice, choice.get("message") or {}) for choice in body["choices"]}
        case Api.RESPONSES:
            choices = {0: _response(body)}
        case Api.MESSAGES:
            choices = {0: _message(body)}
        case _:
            assert_never(api)
    return _content(choices)


class Reader:
    """Events of one answer, over as many connections as it took."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._choices: dict[int, _Choice] = {}
        self.done = False

    def take(self, data: str) -> None:
        """Read one event's data. Raises `StreamFailed` where it reports a failure."""
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if event.get("error") or event.get("type") in ("error", "response.failed"):
            raise StreamFailed(json.dumps(event)[:400])
        match self._api:
            case Api.COMPLETIONS | Api.CHAT:
                for choice in event["choices"]:
                    _add(self._choice(choice["index"]), _openai(choice, choice.get("delta") or {}))
            case Api.RESPONSES:
                if event["type"] in ("response.completed", "response.incomplete"):
                    streamed, final = self._choice(0), _response(event["response"])
                    if streamed.text != final.text:
                        raise StreamFailed(f"deltas {streamed.text!r} are not the response's text {final.text!r}")
                    self._choices[0], self.done = final, True
                elif event["type"] == "response.output_text.delta":
                    self._choice(0).text += event["delta"]
            case Api.MESSAGES:
                self._message_event(event)
            case _:
                assert_never(self._api)

    def content(self) -> AnswerContent:
        return _content(self._choices)

    def _choice(self, index: int) -> _Choice:
        return self._choices.setdefault(index, _Choice())

    def _message_event(self, event: dict[str, Any]) -> None:
        choice = self._choice(0)
        match event["type"]:
            case "content_block_start" if event["content_block"]["type"] == "tool_use":
                choice.call(event["index"])[0] = event["content_block"]["name"]
            case "content_block_delta" if event["delta"]["type"] == "text_delta":
                choice.text += event["delta"]["text"]
            case "content_block_delta":
                choice.call(event["index"])[1] += event["delta"]["partial_json"]
            case "message_delta":
                choice.end = event["delta"]["stop_reason"]
            case "message_stop":
                self.done = True
            case _:
                pass


def _openai(choice: dict[str, Any], message: dict[str, Any]) -> _Choice:
    """Read a choice of a completion or chat, whole or a part of a stream."""
    found = _Choice(text=choice.get("text") or message.get("content") or "", end=choice.get("finish_reason") or "")
    for place, call in enumerate(message.get("tool_calls") or ()):
        name, arguments = call["function"].get("name") or "", call["function"].get("arguments") or ""
        parts = found.call(call.get("index", place))
        parts[0], parts[1] = parts[0] + name, parts[1] + arguments
    scores = choice.get("logprobs") or {}
    found.scored = [*(scores.get("tokens") or ()), *(each["token"] for each in scores.get("content") or ())]
    return found


def _add(choice: _Choice, part: _Choice) -> None:
    choice.text += part.text
    choice.scored += part.scored
    choice.end = part.end or choice.end
    for index, (name, arguments) in part.calls.items():
        call = choice.call(index)
        call[0], call[1] = call[0] + name, call[1] + arguments


def _response(body: dict[str, Any]) -> _Choice:
    found = _Choice(end=body["status"])
    for place, item in enumerate(body["output"]):
        if item["type"] == "function_call":
            found.calls[place] = [item["name"], item["arguments"]]
        else:
            found.text += "".join(part["text"] for part in item["content"])
    return found


def _message(body: dict[str, Any]) -> _Choice:
    found = _Choice(end=body["stop_reason"])
    for place, block in enumerate(body["content"]):
        if block["type"] == "tool_use":
            found.calls[place] = [block["name"], json.dumps(block["input"])]
        else:
            found.text += block["text"]
    return found


def _content(choices: dict[int, _Choice]) -> AnswerContent:
    ordered = [choices[index] for index in sorted(choices)]
    return AnswerContent(
        tuple(choice.text for choice in ordered),
        tuple(tuple((name, _canonical(text)) for name, text in choice.calls.values()) for choice in ordered),
        tuple(tuple(choice.scored) for choice in ordered),
        tuple(choice.end for choice in ordered),
    )


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except ValueError:
        return arguments
