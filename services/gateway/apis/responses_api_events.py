"""The answers of `/v1/responses`: a response whole, or as the events that build it.

    created, in_progress ─▶ output_item.added ─▶ content_part.added, output_text.delta …, output_text.done,
                            content_part.done  │  the same with reasoning_text
                                               │  function_call_arguments.delta …, .done
                         ─▶ output_item.done ─▶ … ─▶ completed | incomplete | failed

`ResponseWriter` takes an answer's pieces as they come. Pure; called by `responses_api.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from cohort.common.errors import RequestError
from cohort.common.types import FinishReason
from cohort.services.gateway.apis.responses_api_bodies import (
    ResponsesBody,
    ResponsesTool,
    TextFormat,
    TextOptions,
    ToolChoice,
    effort_of,
)
from cohort.services.gateway.generation.answer_parts import CallDelta, Reasoning, stable_id
from cohort.services.gateway.generation.choice import Piece
from cohort.services.gateway.generation.openai_shapes import Extras, Usage
from cohort.services.gateway.http.service_headers import printable


class OutputText(msgspec.Struct, frozen=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: msgspec.Raw  # [ChatTokenLogprob, …]


class OutputMessage(msgspec.Struct, frozen=True, tag_field="type", tag="message"):
    id: str
    status: str
    role: str
    content: list[OutputText]


class OutputCall(msgspec.Struct, frozen=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class OutputCustomCall(msgspec.Struct, frozen=True, tag_field="type", tag="custom_tool_call"):
    id: str
    call_id: str
    name: str
    input: str
    status: str


class ReasoningText(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputReasoning(msgspec.Struct, frozen=True, tag_field="type", tag="reasoning"):
    """Item of reasoning, as the model wrote it; a summary is never made."""

    id: str
    summary: list[Any]
    content: list[ReasoningText]
    status: str


Item = OutputMessage | OutputCall | OutputCustomCall | OutputReasoning


class InputTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0


class ResponseUsage(msgspec.Struct, frozen=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True):
    reason: str


class ResponseProblem(msgspec.Struct, frozen=True):
    code: str
    message: str


class ResponseReasoning(msgspec.Struct, frozen=True):
    effort: str | None = None
    summary: None = None


class ResponseObject(msgspec.Struct, frozen=True, kw_only=True):
    """Answer with the request's parameters."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    background: bool = False
    error: ResponseProblem | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[Item] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ResponseReasoning = ResponseReasoning()
    store: bool
    temperature: float
    text: TextOptions
    tool_choice: ToolChoice
    tools: list[ResponsesTool]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None
    cohort: Extras | UnsetType = UNSET


class ResponseEvent(msgspec.Struct, frozen=True):
    type: str
    sequence_number: int
    response: ResponseObject


class ItemEvent(msgspec.Struct, frozen=True):
    type: str
    sequence_number: int
    output_index: int
    item: Item


class PartEvent(msgspec.Struct, frozen=True):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText


class TextDelta(msgspec.Struct, frozen=True):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: msgspec.Raw


class TextDone(msgspec.Struct, frozen=True):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: msgspec.Raw


class ArgumentsDelta(msgspec.Struct, frozen=True):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    delta: str


class ArgumentsDone(msgspec.Struct, frozen=True):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    name: str
    arguments: str


class InputDone(msgspec.Struct, frozen=True):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    input: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    delta: str


class ReasoningDone(msgspec.Struct, frozen=True):
    type: str
    sequence_number: int
    item_id: str
    output_index: int
    content_index: int
    text: str


Event = (
    ResponseEvent
    | ItemEvent
    | PartEvent
    | TextDelta
    | TextDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDone
    | ReasoningDelta
    | ReasoningDone
)


def pending_response(
    body: ResponsesBody, *, response_id: str, created_at: int, model: str, store: bool, temperature: float, top_p: float
) -> ResponseObject:
    """Return the response before its first token, with `temperature` and `top_p` as sampled."""
    return ResponseObject(
        id=response_id,
        created_at=created_at,
        background=bool(body.background),
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata or {},
        model=model,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning=ResponseReasoning(effort_of(body)),
        previous_response_id=body.previous_response_id,
        store=store,
        temperature=temperature,
        text=body.text if body.text is not None and body.text.format else TextOptions(format=TextFormat(type="text")),
        tool_choice="auto" if body.tool_choice is None else body.tool_choice,
        tools=body.tools or [],
        top_logprobs=body.top_logprobs or 0,
        top_p=top_p,
        truncation=body.truncation or "disabled",
        user=body.user,
    )


def failed_response(pending: ResponseObject, error: RequestError, output: Sequence[Item] = ()) -> ResponseObject:
    code = "rate_limit_exceeded" if error.status == 429 else "server_error"
    problem = ResponseProblem(code, printable(error.message, 2000))
    return msgspec.structs.replace(pending, status="failed", error=problem, output=list(output))


@dataclass(slots=True)
class _Message:
    id: str
    text: list[str] = field(default_factory=list)
    logprobs: list[bytes] = field(default_factory=list)
    status: str = "in_progress"

    def part(self) -> OutputText:
        return OutputText("".join(self.text), [], _raw(b",".join(self.logprobs)))

    def item(self) -> Item:
        return OutputMessage(self.id, self.status, "assistant", [self.part()])

    def opening(self) -> Item:
        return OutputMessage(self.id, self.status, "assistant", [])


@dataclass(slots=True)
class _Call:
    id: str
    call_id: str
    name: str
    arguments: list[str] = field(default_factory=list)
    status: str = "in_progress"

    def item(self) -> Item:
        return OutputCall(self.id, self.call_id, self.name, "".join(self.arguments), self.status)

    def opening(self) -> Item:
        return OutputCall(self.id, self.call_id, self.name, "", self.status)


class _CustomCall(_Call):
    """Call of a custom tool, whose only argument is its input: known when the call is whole."""

    def item(self) -> Item:
        return OutputCustomCall(self.id, self.call_id, self.name, self.input, self.status)

    def opening(self) -> Item:
        return OutputCustomCall(self.id, self.call_id, self.name, "", self.status)

    @property
    def input(self) -> str:
        """The input; the model's own words where they are no arguments."""
        arguments = "".join(self.arguments)
        try:
            found = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            found = None
        given = found.get("input") if isinstance(found, dict) else None
        return given if isinstance(given, str) else arguments


@dataclass(slots=True)
class _Reasoning:
    id: str
    text: list[str] = field(default_factory=list)
    status: str = "in_progress"

    def part(self) -> ReasoningText:
        return ReasoningText("".join(self.text))

    def item(self) -> Item:
        return OutputReasoning(self.id, [], [self.part()], self.status)

    def opening(self) -> Item:
        return OutputReasoning(self.id, [], [], self.status)


class ResponseWriter:
    """Writer of one answer: `begin`, `take` for every piece, `close`, then `final` or `failed`, sent in order."""

    def __init__(self, pending: ResponseObject) -> None:
        self.pending = pending
        self._custom = frozenset(tool.name for tool in pending.tools if tool.type == "custom")
        self._items: list[_Message | _Call | _Reasoning] = []
        self._sequence = 0
        self.started = False

    def begin(self) -> Iterator[Event]:
        """Start the response. Nothing happens when repeated."""
        if not self.started:
            self.started = True
            yield ResponseEvent("response.created", self._next(), self.pending)
            yield ResponseEvent("response.in_progress", self._next(), self.pending)

    def take(self, piece: Piece, logprobs: bytes = b"") -> Iterator[Event]:
        """Take a piece; `logprobs` is JSON without the list's brackets."""
        in_message = bool(self._items) and isinstance(self._items[-1], _Message)
        parts = piece.in_order
        if logprobs and not parts and in_message:
            parts = ("",)  # an end token has log-probabilities and no text
        for part in parts:
            match part:
                case CallDelta():
                    yield from self._argument_events(part)
                case Reasoning():
                    yield from self._reasoning_events(part.text)
                case text:
                    yield from self._text_events(text, logprobs)
                    logprobs = b""

    def close(self, finish: FinishReason) -> Iterator[Event]:
        """End the last item. An empty answer is an empty message."""
        if not self._items or (finish is FinishReason.STOP and isinstance(self._items[-1], _Reasoning)):
            yield from self._open(_Message(self._new_id("msg")))
        yield from self._end_item("incomplete" if finish is FinishReason.LENGTH else "completed")

    def response(
        self, finish: FinishReason, usage: Usage, completed_at: int, extras: Extras | UnsetType = UNSET
    ) -> ResponseObject:
        """Return the whole response, after `close`."""
        cut = finish is FinishReason.LENGTH
        return msgspec.structs.replace(
            self.pending,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else completed_at,
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            output=[item.item() for item in self._items],
            usage=usage_of(usage),
            cohort=extras,
        )

    def final(self, response: ResponseObject) -> Event:
        """Return the last event, for what `response` returned."""
        return ResponseEvent(f"response.{response.status}", self._next(), response)

    def failed(self, error: RequestError) -> Event:
        for item in self._items[-1:]:
            item.status = "incomplete"
        failed = failed_response(self.pending, error, [item.item() for item in self._items])
        return ResponseEvent("response.failed", self._next(), failed)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence - 1

    def _text_events(self, text: str, logprobs: bytes) -> Iterator[Event]:
        last = self._items[-1] if self._items else None
        if not isinstance(last, _Message):
            last = _Message(self._new_id("msg"))
            yield from self._open(last)
        last.text.append(text)
        if logprobs:
            last.logprobs.append(logprobs)
        yield TextDelta("response.output_text.delta", self._next(), last.id, self._index, 0, text, _raw(logprobs))

    def _reasoning_events(self, text: str) -> Iterator[Event]:
        last = self._items[-1] if self._items else None
        if not isinstance(last, _Reasoning):
            last = _Reasoning(self._new_id("rs"))
            yield from self._open(last)
        last.text.append(text)
        yield ReasoningDelta("response.reasoning_text.delta", self._next(), last.id, self._index, 0, text)

    def _argument_events(self, call: CallDelta) -> Iterator[Event]:
        if call.id:
            custom = call.name in self._custom
            made = _CustomCall if custom else _Call
            yield from self._open(made(self._new_id("ctc" if custom else "fc"), call.id, call.name))
        last = self._items[-1]
        assert isinstance(last, _Call), "a call's arguments end before any text behind it"
        if call.arguments:
            last.arguments.append(call.arguments)
            if isinstance(last, _CustomCall):
                return
            kind = "response.function_call_arguments.delta"
            yield ArgumentsDelta(kind, self._next(), last.id, self._index, call.arguments)

    def _new_id(self, prefix: str) -> str:
        """Return the id of the next item: the same whenever this response is written."""
        return f"{prefix}_{stable_id(self.pending.id, len(self._items))}"

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _open(self, item: _Message | _Call | _Reasoning) -> Iterator[Event]:
        if self._items:
            yield from self._end_item("completed")
        self._items.append(item)
        yield ItemEvent("response.output_item.added", self._next(), self._index, item.opening())
        if not isinstance(item, _Call):
            kind = "response.content_part.added"
            empty = OutputText("", [], _raw(b"")) if isinstance(item, _Message) else ReasoningText("")
            yield PartEvent(kind, self._next(), item.id, self._index, 0, empty)

    def _end_item(self, status: str) -> Iterator[Event]:
        item = self._items[-1]
        item.status = status
        if isinstance(item, _Message):
            part = item.part()
            kind = "response.output_text.done"
            yield TextDone(kind, self._next(), item.id, self._index, 0, part.text, part.logprobs)
            yield PartEvent("response.content_part.done", self._next(), item.id, self._index, 0, part)
        elif isinstance(item, _Reasoning):
            thought = item.part()
            kind = "response.reasoning_text.done"
            yield ReasoningDone(kind, self._next(), item.id, self._index, 0, thought.text)
            yield PartEvent("response.content_part.done", self._next(), item.id, self._index, 0, thought)
        elif isinstance(item, _CustomCall):
            kind, given = "response.custom_tool_call_input", item.input
            yield ArgumentsDelta(f"{kind}.delta", self._next(), item.id, self._index, given)
            yield InputDone(f"{kind}.done", self._next(), item.id, self._index, given)
        else:
            kind = "response.function_call_arguments.done"
            yield ArgumentsDone(kind, self._next(), item.id, self._index, item.name, "".join(item.arguments))
        yield ItemEvent("response.output_item.done", self._next(), self._index, item.item())


def usage_of(usage: Usage) -> ResponseUsage:
    return ResponseUsage(
        usage.prompt_tokens,
        InputTokensDetails(usage.prompt_tokens_details.cached_tokens),
        usage.completion_tokens,
        OutputTokensDetails(getattr(usage.completion_tokens_details, "reasoning_tokens", 0)),
        usage.total_tokens,
    )


def _raw(items: bytes) -> msgspec.Raw:
    return msgspec.Raw(b"[%b]" % items)
