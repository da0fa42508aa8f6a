"""The body of `/v1/responses`, its items, and the chat that they say.

Structs have types and ranges, in the groups of `bodies.py`; `chat_of` converts a body and the conversation's items to a
`ChatBody`, so that `parsing.py` has all further rules. Its errors name the chat's fields: `NAMES` translates. Pure;
called by `responses_api.py`.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, takewhile
from typing import Annotated, Any, Literal

import msgspec

from cohort.common.errors import RequestError
from cohort.services.gateway.batches.batch_objects import Key, Value
from cohort.services.gateway.http.bodies import (
    MAX_LOGPROBS,
    AllowedToolChoice,
    AllowedTools,
    AtLeastOne,
    ChatBody,
    CohortOptions,
    FunctionTool,
    JsonSchemaFormat,
    NamedFunction,
    NamedToolChoice,
    ResponseFormat,
    Signed64,
    Tool,
)
from cohort.services.gateway.http.ignored_fields import note
from cohort.services.gateway.http.service_headers import printable
from cohort.services.gateway.requests.parsing import no_text

NAMES = (
    (r"tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"response_format\.json_schema", "text.format"),
    (r"response_format", "text.format"),
    (r"messages", "input"),
    (r"max_(completion_)?tokens", "max_output_tokens"),
)
"""Patterns for `error_shapes.renamed`."""
LOGPROBS = "message.output_text.logprobs"
_NEVER_PRESENT = frozenset(
    (
        "reasoning.encrypted_content",
        "file_search_call.results",
        "web_search_call.results",
        "web_search_call.action.sources",
        "code_interpreter_call.outputs",
        "computer_call_output.output.image_url",
        "message.input_image.image_url",
    )
)
"""Parts that may be requested, of items that no answer here has."""
_CALLS = ("function_call", "custom_tool_call")
_TEXT_PARTS = ("input_text", "output_text", "reasoning_text", "summary_text", "text")


class ContentPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`input_text`, or `reasoning_text` and `output_text` of an earlier answer, whose annotations and log-probabilities
    are tolerated."""

    type: str
    text: str | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    # Of images and files, which are refused.
    image_url: Any = None
    file_id: Any = None
    file_url: Any = None
    file_data: Any = None
    filename: Any = None
    detail: Any = None


class InputItem(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A `message` (`role`, `content`), a `reasoning` (`content`, or `summary`), a `function_call` (`call_id`, `name`,
    `arguments`), a `function_call_output` (`call_id`, `output`), or the same of a custom tool, with `input`. Without a
    type it is a message. `status`, `phase` and `encrypted_content` are tolerated."""

    type: str | None = None
    id: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: str | None = None
    name: str | None = None
    arguments: str | None = None
    input: str | None = None
    output: str | list[ContentPart] | None = None
    summary: list[ContentPart] | None = None
    encrypted_content: str | None = None
    status: str | None = None
    phase: str | None = None


class CustomFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Form of a custom tool's input: a grammar is shown to the model, and a call that must be made is bound to a
    regular expression."""

    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class ResponsesTool(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A function, `strict` as in a chat completion; or a `custom` tool, whose input is a text."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None


class NamedTool(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="function"
):
    name: str


class NamedCustomTool(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="custom"
):
    name: str


class AllowedResponsesTools(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type", tag="allowed_tools"
):
    """Choice among some of the tools, as in a chat completion."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool | NamedCustomTool], msgspec.Meta(min_length=1)]


ToolChoice = str | NamedTool | NamedCustomTool | AllowedResponsesTools


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """`strict` as in a chat completion."""

    type: str
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    format: TextFormat | None = None
    verbosity: str | None = None  # ignored, and named in the answer's header


class ResponsesStreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool | None = None  # tolerated: we add no padding to obfuscate the sizes of events


class ResponsesBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/responses. `top_k`, `seed`, `priority` and `cohort` as in a chat completion."""

    # Honoured.
    input: str | list[InputItem]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    include: list[str] | None = None
    max_output_tokens: AtLeastOne | None = None
    metadata: Annotated[dict[Key, Value], msgspec.Meta(max_length=16)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)] | None = None
    seed: Signed64 | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    cohort: CohortOptions | None = None
    # Tolerated: they label or route a request, or bound tools that run on the server, of which there are none.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    stream_options: ResponsesStreamOptions | None = None
    max_tool_calls: int | None = None
    reasoning: dict[str, Any] | None = None  # its `effort` is honoured, a summary never made
    # Ignored, and named in the answer's header.
    context_management: Any = None
    # Refused unless they ask for nothing.
    conversation: Any = None
    prompt: Any = None
    moderation: Any = None


def effort_of(body: ResponsesBody) -> str | None:
    """Return the effort of reasoning that is asked for. Raises `RequestError`."""
    effort = (body.reasoning or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise RequestError("reasoning.effort must be a text.", param="reasoning.effort")
    return effort


def switches_of(body: ResponsesBody) -> list[str]:
    """Return the fields that ask for reasoning."""
    return ["reasoning"] if any(value not in (None, "none") for value in (body.reasoning or {}).values()) else []


def items_of(body: ResponsesBody) -> list[InputItem]:
    """Return the body's own items in long form, each with an id. Raises `RequestError` for an unsupported one."""
    if isinstance(body.input, str):
        return [_item(InputItem(role="user", content=body.input), "input")]
    return [_item(item, f"input[{index}]") for index, item in enumerate(body.input)]


def chat_of(body: ResponsesBody, items: Sequence[InputItem]) -> ChatBody:
    """Convert to a chat completion; `items` is the conversation, the body's own last. Raises `RequestError`."""
    _refuse_unsupported(body)
    instructions = [{"role": "system", "content": body.instructions}] if body.instructions else []
    messages = [*instructions, *_chat_messages(items)]
    if not messages:
        raise RequestError("input is empty.", param="input")
    return ChatBody(
        model=body.model,
        messages=messages,
        reasoning_effort=effort_of(body),
        tools=[
            _tool(index, tool, bound=_must_call(body.tool_choice, tool.name))
            for index, tool in enumerate(body.tools or [])
            if _is_ours_to_offer(tool)
        ]
        or None,
        tool_choice=_choice(body),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text),
        max_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        logprobs=body.top_logprobs is not None or LOGPROBS in (body.include or ()),
        top_logprobs=body.top_logprobs,
        seed=body.seed,
        stream=body.stream,
        priority=body.priority,
        cohort=body.cohort,
    )


def _refuse_unsupported(body: ResponsesBody) -> None:
    if body.text is not None and body.text.verbosity is not None:
        note("text.verbosity")
    if body.context_management:
        note("context_management")
    for name in ("conversation", "prompt", "moderation"):
        if getattr(body, name):
            raise _refused(name, "not supported")
    for index, part in enumerate(body.include or ()):
        if part in _NEVER_PRESENT:
            note(f"include.{part}")
        elif part != LOGPROBS:
            raise _refused(f"include[{index}]", f"{printable(part)!r} is in no answer here")


def _item(item: InputItem, where: str) -> InputItem:
    match item.type or "message":
        case "message":
            return _message(item, where)
        case "function_call":
            for name in ("call_id", "name", "arguments"):
                if getattr(item, name) is None:
                    raise RequestError(f"{where}.{name} is missing.", param=f"{where}.{name}")
            return InputItem(
                type="function_call",
                id=item.id or _new_id("fc"),
                call_id=item.call_id,
                name=item.name,
                arguments=item.arguments,
                status="completed",
            )
        case "custom_tool_call":
            for name in ("call_id", "name", "input"):
                if getattr(item, name) is None:
                    raise RequestError(f"{where}.{name} is missing.", param=f"{where}.{name}")
            return InputItem(
                type="custom_tool_call",
                id=item.id or _new_id("ctc"),
                call_id=item.call_id,
                name=item.name,
                input=item.input,
                status="completed",
            )
        case "function_call_output" | "custom_tool_call_output" as kind:
            for name in ("call_id", "output"):
                if getattr(item, name) is None:
                    raise RequestError(f"{where}.{name} is missing.", param=f"{where}.{name}")
            return InputItem(
                type=kind,
                id=item.id or _new_id("fco" if kind == "function_call_output" else "ctco"),
                call_id=item.call_id,
                output=_text(item.output or "", f"{where}.output"),
                status="completed",
            )
        case "reasoning":
            text = _text([*(item.content or ()), *(() if item.content else item.summary or ())], where)
            part = ContentPart(type="reasoning_text", text=text)
            return InputItem(type="reasoning", id=item.id or _new_id("rs"), summary=[], content=[part])
        case other:
            raise RequestError(
                f"{where}.type: an item of type {printable(other)!r} is not read here; messages, reasoning, calls of "
                "functions and custom tools, and their outputs are.",
                param=f"{where}.type",
            )


def _message(item: InputItem, where: str) -> InputItem:
    for name in ("role", "content"):
        if getattr(item, name) is None:
            raise RequestError(f"{where}.{name} is missing.", param=f"{where}.{name}")
    content = item.content if item.content is not None else ""
    parts = [ContentPart(type="input_text", text=content)] if isinstance(content, str) else content
    is_output = item.role == "assistant"
    return InputItem(
        type="message",
        id=item.id or _new_id("msg"),
        role=item.role,
        status="completed",
        content=[
            ContentPart(
                type="output_text" if is_output else "input_text",
                text=_part(part, f"{where}.content[{number}]"),
                annotations=[] if is_output else None,
            )
            for number, part in enumerate(parts)
        ],
    )


def _text(content: str | list[ContentPart], where: str) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{where}[{number}]") for number, part in enumerate(content))


def _part(part: ContentPart, where: str) -> str:
    if part.type not in _TEXT_PARTS:
        raise no_text(where, part.type)
    if part.text is None:
        raise RequestError(f"{where}.text is missing.", param=f"{where}.text")
    return part.text


def without_oldest(items: Sequence[InputItem], messages: int) -> list[InputItem]:
    """Return the items without the oldest that are as many messages, those of the system at their head excepted."""
    groups = list(_grouped(items))
    head = len(list(takewhile(lambda group: group[0].role in ("system", "developer"), groups)))
    return [item for group in (*groups[:head], *groups[head + messages :]) for item in group]


def _grouped(items: Sequence[InputItem]) -> Iterator[list[InputItem]]:
    """Return the items of each message. What the assistant wrote and called between two other items is one."""
    for ours, group in groupby(items, key=_is_ours):
        if ours:
            yield list(group)
        else:
            yield from ([item] for item in group)


def _is_ours(item: InputItem) -> bool:
    return item.type in (*_CALLS, "reasoning") or item.role == "assistant"


def _chat_messages(items: Sequence[InputItem]) -> Iterator[dict[str, Any]]:
    for group in _grouped(items):
        item = group[0]
        if _is_ours(item):
            yield _turn(group)
        elif item.type in ("function_call_output", "custom_tool_call_output"):
            yield {"role": "tool", "tool_call_id": item.call_id, "content": item.output}
        else:
            # Templates know `system`; a developer's words are to be followed in the same way.
            role = "system" if item.role == "developer" else item.role
            yield {"role": role, "content": _text(item.content or "", "input")}


def _turn(items: Iterable[InputItem]) -> dict[str, Any]:
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for item in items:
        if item.type == "reasoning":
            thoughts.append(_text(item.content or "", "input"))
        elif item.type in _CALLS:
            arguments = {"input": item.input} if item.type == "custom_tool_call" else item.arguments
            function = {"name": item.name, "arguments": arguments}
            calls.append({"id": item.call_id, "type": "function", "function": function})
        elif text := _text(item.content or "", "input"):
            texts.append(text)
    message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if any(thoughts):
        message["reasoning_content"] = "\n".join(thoughts)
    return {**message, "tool_calls": calls} if calls else message


def _is_ours_to_offer(tool: ResponsesTool) -> bool:
    """Return whether the model is offered a tool. Those that OpenAI's servers run (`web_search` …) come with every
    request of some clients: the answer goes without them, as without a field that nobody knows."""
    if tool.type in ("function", "custom"):
        return True
    note(f"tools.{tool.type}")
    return False


def _tool(index: int, tool: ResponsesTool, *, bound: bool) -> Tool:
    """Convert a tool. `bound`: a call must be made. Raises `RequestError`."""
    if tool.name is None:
        raise RequestError(f"tools[{index}].name is missing.", param=f"tools[{index}].name")
    if tool.type == "custom":
        return _custom_tool(tool, tool.name, f"tools[{index}].format", bound=bound)
    return Tool("function", FunctionTool(tool.name, tool.description, tool.parameters, tool.strict))


def _custom_tool(tool: ResponsesTool, name: str, where: str, *, bound: bool) -> Tool:
    """Return a function of one text, which stands for a custom tool."""
    description, text = tool.description or "", {"type": "string"}
    if tool.format is not None and tool.format.type == "grammar":
        definition, syntax = tool.format.definition, tool.format.syntax
        if definition is None or syntax is None:
            missing = "syntax" if syntax is None else "definition"
            raise RequestError(f"{where}.{missing} is missing.", param=f"{where}.{missing}")
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
        elif bound:
            raise _refused(f"{where}.syntax", "the input of a call that must be made can be bound to a regex, no other")
        description = f"{description}\nThe input keeps to this {syntax} grammar:\n{definition}".strip()
    parameters = {"type": "object", "properties": {"input": text}, "required": ["input"]}
    return Tool("function", FunctionTool(name, description or None, parameters))


def _choice(body: ResponsesBody) -> str | NamedToolChoice | AllowedToolChoice | None:
    match body.tool_choice:
        case NamedTool(name=name) | NamedCustomTool(name=name):
            return NamedToolChoice(NamedFunction(name))
        case AllowedResponsesTools(mode=mode, tools=tools):
            return AllowedToolChoice(AllowedTools(mode, [NamedToolChoice(NamedFunction(tool.name)) for tool in tools]))
        case choice:
            return choice


def _must_call(choice: ToolChoice | None, name: str | None) -> bool:
    """Return whether a call of this tool may be bound to its form."""
    match choice:
        case NamedTool() | NamedCustomTool():
            return choice.name == name
        case AllowedResponsesTools():
            return choice.mode == "required" and any(tool.name == name for tool in choice.tools)
    return choice == "required"


def _format(text: TextOptions | None) -> ResponseFormat | None:
    if text is None or text.format is None:
        return None
    return ResponseFormat(text.format.type, JsonSchemaFormat(schema=text.format.schema, strict=text.format.strict))


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


def _refused(param: str, reason: str) -> RequestError:
    return RequestError(f"{param}: {reason}.", param=param)
