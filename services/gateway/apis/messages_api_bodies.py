"""The bodies of `/v1/messages` and `/v1/messages/count_tokens`, and the chat that they say.

Structs have types and ranges, in the groups of `bodies.py`; `chat_of` converts a body to a `ChatBody`, so that
`parsing.py` has all further rules. Its errors name the chat's fields: `NAMES` translates. Pure; called by
`messages_api.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Annotated, Any, Literal

import msgspec

from cohort.common.errors import RequestError
from cohort.services.gateway.http.bodies import (
    MAX_STOP_STRINGS,
    AtLeastOne,
    ChatBody,
    CohortOptions,
    FunctionTool,
    JsonSchemaFormat,
    NamedFunction,
    NamedToolChoice,
    ResponseFormat,
    Signed64,
    StopString,
    Tool,
)
from cohort.services.gateway.http.ignored_fields import note
from cohort.services.gateway.http.service_headers import printable
from cohort.services.gateway.requests.parsing import no_text
from cohort.services.gateway.requests.tools import thinking_switch

NAMES = (
    (r"tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"response_format\.json_schema", "output_config.format"),
    (r"response_format", "output_config.format"),
    (r"stop", "stop_sequences"),
    (r"max_completion_tokens", "max_tokens"),
    (r"n", "max_tokens"),
    (r"continue_final_message", "messages"),
)
"""Patterns for `error_shapes.renamed`."""
ERROR_MARK = "Error: "
"""Prefix of a failed tool's result: chat templates have no other place for `is_error`."""

_CALL, _TOOL_USE = "call_", "toolu_"


def tool_use_id(call_id: str) -> str:
    """Return a call's id as Anthropic's clients expect it."""
    return _TOOL_USE + call_id.removeprefix(_CALL)


def own_id(tool_use_id: str) -> str:
    """Return a call's id without Anthropic's mark: templates that print ids may want a certain length."""
    return tool_use_id.removeprefix(_TOOL_USE)


Text = Annotated[str, msgspec.Meta(min_length=1)]


class InputBlock(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a message: `text`, `thinking`, `tool_use` (`id`, `name`, `input`) or `tool_result` (`tool_use_id`,
    `content`, `is_error`). `cache_control`, `signature` and empty `citations` are tolerated."""

    type: str
    text: str | None = None
    thinking: str | None = None
    signature: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | list[InputBlock] | None = None
    is_error: bool | None = None
    cache_control: Any = None
    citations: Any = None
    source: Any = None  # of images and documents, which are refused


class InputMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[InputBlock]


class MessagesTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tool of the client's own; `strict` as in a chat completion."""

    name: str
    input_schema: dict[str, Any] | None = None
    description: str | None = None
    type: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None  # tolerated: arguments are always streamed as they are written


class MessagesToolChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, frozen=True, kw_only=True):
    """`disabled` turns reasoning off, any other type on, where the chat template has a switch; a budget is ignored."""

    type: str


class OutputFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format: OutputFormat | None = None
    effort: str | None = None


class MessagesMetadata(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    user_id: str | None = None


class CountTokensBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages/count_tokens."""

    # Honoured.
    model: str
    messages: Annotated[list[InputMessage], msgspec.Meta(min_length=1)]
    system: str | list[InputBlock] | None = None
    tools: list[MessagesTool] | None = None
    tool_choice: MessagesToolChoice | None = None
    output_config: OutputConfig | None = None
    # Tolerated: prefixes are cached without being asked for.
    cache_control: Any = None
    # Honoured where the chat template has a switch, else named in the answer's header.
    thinking: Thinking | None = None
    context_management: Any = None


class MessagesBody(CountTokensBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/messages. `top_k`, `seed`, `priority` and `cohort` as in a chat completion."""

    # Honoured.
    max_tokens: AtLeastOne
    stop_sequences: Annotated[list[StopString], msgspec.Meta(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)] | None = None
    stream: bool | None = None
    seed: Signed64 | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cohort: CohortOptions | None = None
    # Tolerated: they label or route a request and never change an answer.
    metadata: MessagesMetadata | None = None
    service_tier: str | None = None
    # Refused unless they ask for nothing.
    container: Any = None
    mcp_servers: list[Any] | None = None


def chat_of(body: CountTokensBody) -> ChatBody:
    """Convert the body to a chat completion. Raises `RequestError`."""
    _refuse_unsupported(body)
    messages = [*_system(body.system), *_chat_messages(body.messages)]
    choice = body.tool_choice
    serial = choice is not None and choice.disable_parallel_tool_use is True
    config = body.output_config or OutputConfig()
    generating = body if isinstance(body, MessagesBody) else None
    return ChatBody(
        model=body.model,
        messages=messages,
        continue_final_message=body.messages[-1].role == "assistant",
        reasoning_effort=config.effort,
        chat_template_kwargs=None if body.thinking is None else thinking_switch(body.thinking.type != "disabled"),
        tools=[_tool(index, tool) for index, tool in enumerate(body.tools or [])] or None,
        tool_choice=_choice(choice),
        parallel_tool_calls=False if serial else None,
        response_format=ResponseFormat("json_schema", JsonSchemaFormat(schema=config.format.schema))
        if config.format is not None
        else None,
        max_tokens=generating.max_tokens if generating else None,
        stop=generating.stop_sequences if generating else None,
        temperature=generating.temperature if generating else None,
        top_p=generating.top_p if generating else None,
        top_k=generating.top_k if generating else None,
        seed=generating.seed if generating else None,
        stream=generating.stream if generating else None,
        priority=generating.priority if generating else None,
        cohort=generating.cohort if generating else None,
    )


def switches_of(body: CountTokensBody) -> list[str]:
    """Return the fields that ask for reasoning."""
    found = [] if body.thinking is None or body.thinking.type == "disabled" else ["thinking"]
    return [*found, "output_config.effort"] if body.output_config is not None and body.output_config.effort else found


def _refuse_unsupported(body: CountTokensBody) -> None:
    if body.context_management:
        note("context_management")
    if isinstance(body, MessagesBody):
        for name in ("container", "mcp_servers"):
            if getattr(body, name):
                raise _refused(name, "not supported")


def _system(system: str | list[InputBlock] | None) -> list[dict[str, Any]]:
    if not system:
        return []
    return [{"role": "system", "content": _texts(system, "system")}]


def _chat_messages(messages: Sequence[InputMessage]) -> Iterator[dict[str, Any]]:
    """Convert messages. Neighbours of one role are one turn, as at Anthropic; tool results stand alone."""
    for role, group in groupby(enumerate(messages), key=lambda each: each[1].role):
        placed = [
            (block, f"messages[{number}].content[{place}]")
            for number, message in group
            for place, block in enumerate(_blocks(message.content))
        ]
        match role:
            case "assistant":
                yield _assistant(placed)
            case "system":
                yield {"role": "system", "content": "\n".join(_text(block, where) for block, where in placed)}
            case "user":
                yield from _user(placed)


def _blocks(content: str | list[InputBlock]) -> list[InputBlock]:
    return [InputBlock(type="text", text=content)] if isinstance(content, str) else content


def _user(placed: Sequence[tuple[InputBlock, str]]) -> Iterator[dict[str, Any]]:
    for are_results, group in groupby(placed, key=lambda each: each[0].type == "tool_result"):
        if not are_results:
            yield {"role": "user", "content": "\n".join(_text(block, where) for block, where in group)}
            continue
        for block, where in group:
            if block.tool_use_id is None:
                raise RequestError(f"{where}.tool_use_id is missing.", param=f"{where}.tool_use_id")
            content = _texts(block.content or "", f"{where}.content")
            mark = ERROR_MARK if block.is_error else ""
            yield {"role": "tool", "tool_call_id": own_id(block.tool_use_id), "content": mark + content}


def _assistant(placed: Sequence[tuple[InputBlock, str]]) -> dict[str, Any]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for block, where in placed:
        if block.type in ("thinking", "redacted_thinking"):
            thoughts.append(block.thinking or "")
            continue
        if block.type != "tool_use":
            texts.append(_text(block, where))
            continue
        if not block.id or not block.name:
            missing = "name" if block.id else "id"
            raise RequestError(f"{where}.{missing} is missing.", param=f"{where}.{missing}")
        function = {"name": block.name, "arguments": block.input or {}}
        calls.append({"id": own_id(block.id), "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _texts(content: str | list[InputBlock], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_text(block, f"{where}[{place}]") for place, block in enumerate(content))


def _text(block: InputBlock, where: str) -> str:
    if block.type in ("image", "document"):
        raise no_text(where, block.type)
    if block.type != "text":
        raise RequestError(
            f"{where}: a block of type {printable(block.type)!r} is not read here; text, and tool_use and tool_result "
            "where they belong, are.",
            param=where,
        )
    if block.text is None:
        raise RequestError(f"{where}.text is missing.", param=f"{where}.text")
    if block.citations:
        raise _refused(f"{where}.citations", "not supported")
    return block.text


def _tool(index: int, tool: MessagesTool) -> Tool:
    if tool.type not in (None, "custom"):
        raise _refused(f"tools[{index}].type", f"{printable(tool.type)!r} is not served here; only your own tools are")
    if tool.input_schema is None:
        raise RequestError(f"tools[{index}].input_schema is missing.", param=f"tools[{index}].input_schema")
    return Tool("function", FunctionTool(tool.name, tool.description, tool.input_schema, tool.strict))


def _choice(choice: MessagesToolChoice | None) -> str | NamedToolChoice | None:
    if choice is None:
        return None
    if choice.type != "tool":
        return "required" if choice.type == "any" else choice.type
    if not choice.name:
        raise RequestError("tool_choice.name is missing.", param="tool_choice.name")
    return NamedToolChoice(NamedFunction(choice.name))


def _refused(param: str, reason: str) -> RequestError:
    return RequestError(f"{param}: {reason}.", param=param)
