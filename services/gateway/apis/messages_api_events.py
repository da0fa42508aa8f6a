"""The answers of `/v1/messages`: a message whole, or as the events that build it.

    message_start ─▶ content_block_start, ping, content_block_delta …, content_block_stop ─▶ … ─▶ message_delta
                                                                                                      └▶ message_stop

`MessageWriter` takes an answer's pieces as they come. Pure; called by `messages_api.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from cohort.common.types import FinishReason
from cohort.services.gateway.apis.messages_api_bodies import tool_use_id
from cohort.services.gateway.generation.answer_parts import CallDelta, Reasoning, stable_id
from cohort.services.gateway.generation.choice import Piece
from cohort.services.gateway.generation.openai_shapes import Extras, Usage


class TextBlock(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag_field="type", tag="thinking"):
    """Block of reasoning. `signature`: what clients want with a block to send it back; nothing is checked by it."""

    thinking: str
    signature: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageUsage(msgspec.Struct, frozen=True):
    """Prompt tokens are those of `input_tokens` and `cache_read_input_tokens` together."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(msgspec.Struct, frozen=True):
    id: str
    type: str
    role: str
    model: str
    content: list[Block]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage
    cohort: Extras | UnsetType = UNSET


class MessageStart(msgspec.Struct, frozen=True, tag_field="type", tag="message_start"):
    message: MessageAnswer


class BlockStart(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: Block


class Ping(msgspec.Struct, frozen=True, tag_field="type", tag="ping"):
    pass


class TextBlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="text_delta"):
    text: str


class InputDelta(msgspec.Struct, frozen=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class ThinkingDelta(msgspec.Struct, frozen=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class SignatureDelta(msgspec.Struct, frozen=True, tag_field="type", tag="signature_delta"):
    signature: str


class BlockDelta(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextBlockDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, frozen=True, tag_field="type", tag="content_block_stop"):
    index: int


class StopDelta(msgspec.Struct, frozen=True):
    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, frozen=True, tag_field="type", tag="message_delta"):
    delta: StopDelta
    usage: MessageUsage
    cohort: Extras | UnsetType = UNSET


class MessageStop(msgspec.Struct, frozen=True, tag_field="type", tag="message_stop"):
    pass


Event = MessageStart | BlockStart | Ping | BlockDelta | BlockStop | MessageDelta | MessageStop


@dataclass(slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str]


@dataclass(slots=True)
class _Text:
    parts: list[str] = field(default_factory=list)


@dataclass(slots=True)
class _Thinking:
    signature: str
    parts: list[str] = field(default_factory=list)


class MessageWriter:
    """Writer of one answer: `begin` once, `take` for every piece, `end` once; events are sent in their order."""

    def __init__(self, message_id: str, model: str) -> None:
        self._id = message_id
        self._model = model
        self._blocks: list[_Text | _Thinking | _Call] = []
        self._pinged = False
        self.started = False

    def begin(self, usage: Usage) -> Iterator[Event]:
        """Start the message, once the prompt's tokens are counted. Nothing happens when repeated."""
        if not self.started:
            self.started = True
            yield MessageStart(
                MessageAnswer(self._id, "message", "assistant", self._model, [], None, None, usage_of(usage))
            )

    def take(self, piece: Piece) -> Iterator[Event]:
        for part in piece.in_order:
            match part:
                case CallDelta():
                    yield from self._argument_events(part)
                case Reasoning():
                    yield from self._thinking_events(part.text)
                case text:
                    yield from self._text_events(text)

    def end(
        self, finish: FinishReason, stop_string: str | None, usage: Usage, extras: Extras | UnsetType = UNSET
    ) -> Iterator[Event]:
        yield from self._close()
        stop = StopDelta(self._stop_reason(finish, stop_string), stop_string)
        yield MessageDelta(stop, usage_of(usage), extras)
        yield MessageStop()

    def message(
        self, finish: FinishReason, stop_string: str | None, usage: Usage, extras: Extras | UnsetType = UNSET
    ) -> MessageAnswer:
        """Return the whole message. Invalid JSON arguments become text: no client must run a malformed call."""
        content = [_block(block) for block in self._blocks]
        reason = self._stop_reason(finish, stop_string)
        if reason == "tool_use" and not any(isinstance(block, ToolUseBlock) for block in content):
            reason = "end_turn"
        return MessageAnswer(
            self._id, "message", "assistant", self._model, content, reason, stop_string, usage_of(usage), extras
        )

    def _stop_reason(self, finish: FinishReason, stop_string: str | None) -> str:
        if finish is FinishReason.LENGTH:
            return "max_tokens"
        if stop_string is not None:
            return "stop_sequence"
        return "tool_use" if any(isinstance(block, _Call) for block in self._blocks) else "end_turn"

    def _text_events(self, text: str) -> Iterator[Event]:
        last = self._blocks[-1] if self._blocks else None
        if not isinstance(last, _Text):
            last = _Text()
            yield from self._open(last, TextBlock(""))
        last.parts.append(text)
        yield BlockDelta(len(self._blocks) - 1, TextBlockDelta(text))

    def _thinking_events(self, text: str) -> Iterator[Event]:
        last = self._blocks[-1] if self._blocks else None
        if not isinstance(last, _Thinking):
            last = _Thinking(stable_id(self._id, len(self._blocks)))
            yield from self._open(last, ThinkingBlock("", ""))
        last.parts.append(text)
        yield BlockDelta(len(self._blocks) - 1, ThinkingDelta(text))

    def _argument_events(self, call: CallDelta) -> Iterator[Event]:
        if call.id:
            shown = tool_use_id(call.id)
            yield from self._open(_Call(shown, call.name, []), ToolUseBlock(shown, call.name, {}))
        last = self._blocks[-1]
        assert isinstance(last, _Call), "a call's arguments end before any text behind it"
        if call.arguments:
            last.arguments.append(call.arguments)
            yield BlockDelta(len(self._blocks) - 1, InputDelta(call.arguments))

    def _open(self, block: _Text | _Thinking | _Call, shown: Block) -> Iterator[Event]:
        yield from self._close()
        self._blocks.append(block)
        yield BlockStart(len(self._blocks) - 1, shown)
        if not self._pinged:
            self._pinged = True
            yield Ping()

    def _close(self) -> Iterator[Event]:
        if self._blocks:
            if isinstance(last := self._blocks[-1], _Thinking):
                yield BlockDelta(len(self._blocks) - 1, SignatureDelta(last.signature))
            yield BlockStop(len(self._blocks) - 1)


def usage_of(usage: Usage) -> MessageUsage:
    cached = usage.prompt_tokens_details.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, 0, cached, usage.completion_tokens)


def _block(block: _Text | _Thinking | _Call) -> Block:
    if isinstance(block, _Thinking):
        return ThinkingBlock("".join(block.parts), block.signature)
    if isinstance(block, _Text):
        return TextBlock("".join(block.parts))
    arguments = "".join(block.arguments)
    try:
        given = msgspec.json.decode(arguments) if arguments.strip() else {}
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        given = None
    if not isinstance(given, dict):
        return TextBlock(f"{block.name} {arguments}")
    return ToolUseBlock(block.id, block.name, given)
