"""The tools of a chat: which its model may and which it must call, and earlier turns as its chat template wants them.

`formats.py` has the form of calls. A template without a place for tools gets them in a system message, in Hermes' form,
which many small models have seen, or its family's; one with an unknown form refuses tools. `tool_choice` none leaves
the tools out; required and a named function bind the answer by a grammar (`call_grammars.py`), and so does a form of
the answer beside tools; with auto alone, what the model writes is read (`answer_reader.py`). Pure; called by
`parsing.py` and `token_api.py`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cohort.common.errors import RequestError
from cohort.services.gateway import bounds
from cohort.services.gateway.http.bodies import AllowedToolChoice, AllowedTools, ChatBody, NamedToolChoice, Tool
from cohort.services.gateway.requests.call_grammars import Function, bound
from cohort.services.gateway.requests.formats import AnswerFormat
from cohort.services.gateway.text.grammar_process import GrammarSpec

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of one request: `prompt` as the template gets them, `schemas` those of their arguments by function,
    `grammar_spec` the calls that the answer is bound to, or the form that it may have instead."""

    prompt: tuple[dict[str, Any], ...]
    parallel: bool
    schemas: Mapping[str, Mapping[str, Any]]
    grammar_spec: GrammarSpec | None


def tool_use(body: ChatBody, format_: AnswerFormat | None, answer: GrammarSpec | None = None) -> ToolUse | None:
    """Return the tools, or None if no call is to be read. `answer`: the form of an answer without calls. Raises
    `RequestError`."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice: there are no tools to choose from.", param="tool_choice")
        return None
    if len(tools) > (most := bounds.BOUNDS.tools):
        raise RequestError(f"tools: there are {len(tools)}, but at most {most} are read.", param="tools")
    functions = [_function(index, tool) for index, tool in enumerate(tools)]
    names = [function.name for function in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"tools: two functions are named {twice!r}.", param="tools")
    if choice == "none":
        return None
    if format_ is None or not format_.reads_calls:
        raise RequestError(
            "tools: this model's chat template has calls of tools in a form that is not read here.", param="tools"
        )
    parallel = body.parallel_tool_calls is not False
    if isinstance(choice, AllowedToolChoice):
        tools, functions = _allowed(choice.allowed_tools, tools, functions)
        choice = choice.allowed_tools.mode
    match choice:
        case None | "auto":
            callable_ = functions if answer is not None else []
        case "required":
            callable_, answer = functions, None
        case NamedToolChoice():
            callable_ = [function for function in functions if function.name == choice.function.name]
            parallel, answer = False, None
            if not callable_:
                raise _no_such_tool(choice)
        case other:
            raise RequestError(
                f"tool_choice: {str(other)[:100]!r} is none of 'auto', 'required', 'none' and a function.",
                param="tool_choice",
            )
    wanted = bound_spec(format_, callable_, parallel=parallel, answer=answer) if callable_ else None
    schemas = {function.name: function.parameters.get("properties") or {} for function in functions}
    return ToolUse(tuple(as_prompted(tool) for tool in tools), parallel, schemas, wanted)


def bound_spec(
    format_: AnswerFormat, functions: Sequence[Function], *, parallel: bool, answer: GrammarSpec | None
) -> GrammarSpec:
    """Return the grammar of calls or of the answer's form. Raises `RequestError` for a form that cannot be joined."""
    param = "tools" if answer is None else answer.param
    try:
        return GrammarSpec("lark", bound(format_, functions, parallel=parallel, answer=answer), param)
    except ValueError as error:
        raise RequestError(f"{param}: {error}.", param=param) from error


def thinking_switch(on: bool) -> dict[str, Any]:
    """Return the template's variables for reasoning at all: the names that templates know, which ignore all others."""
    return {"enable_thinking": on, "thinking": on}


def effort_switch(effort: str | None, format_: AnswerFormat | None) -> dict[str, Any]:
    """Return the template's variables for a `reasoning_effort`."""
    if effort is None:
        return {}
    known = effort if format_ is None else format_.efforts.get(effort, effort)
    return {**thinking_switch(effort != "none"), "reasoning_effort": known}


def for_template(messages: Sequence[dict[str, Any]], format_: AnswerFormat | None) -> list[dict[str, Any]]:
    """Return messages with earlier reasoning and earlier calls' arguments as the template takes them."""
    return [message if message["role"] != "assistant" else _own_turn(message, format_) for message in messages]


def _own_turn(message: dict[str, Any], format_: AnswerFormat | None) -> dict[str, Any]:
    reasoning = message.get("reasoning_content")
    key = "reasoning_content" if format_ is None else format_.reasoning_key
    if reasoning and key != "reasoning_content":
        message = {name: value for name, value in message.items() if name != "reasoning_content"} | {key: reasoning}
        if message.get("tool_calls") and message["content"]:  # its template takes one text before a call
            message |= {key: f"{reasoning}\n{message['content']}", "content": ""}
    if format_ is not None and format_.arguments_text and "tool_calls" in message:
        message = {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
    return message


def _with_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def with_tools(
    messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], format_: AnswerFormat | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the messages and the template's variables that have the tools in them."""
    place = "variable" if format_ is None else format_.place
    if place == "text" and format_ is not None and format_.body == "json":
        return prompted(messages, tools, format_), {}
    if place == "system" and tools:
        head = messages[0] if messages and messages[0]["role"] == "system" else {"role": "system", "content": ""}
        rest = messages[1:] if head is (messages[0] if messages else None) else messages
        listed = json.dumps([tool["function"] for tool in tools], ensure_ascii=False)
        return [{**head, "tools": listed}, *rest], {}
    return list(messages), {"tools": list(tools)} if tools else {}


def _allowed(
    allowed: AllowedTools, tools: Sequence[Tool], functions: Sequence[Function]
) -> tuple[list[Tool], list[Function]]:
    """Return the tools that may be called, in their own order. Raises `RequestError`."""
    names = {choice.function.name for choice in allowed.tools}
    known = {function.name for function in functions}
    if unknown := next((choice for choice in allowed.tools if choice.function.name not in known), None):
        raise _no_such_tool(unknown)
    kept = [(tool, function) for tool, function in zip(tools, functions, strict=True) if function.name in names]
    return [tool for tool, _ in kept], [function for _, function in kept]


def _no_such_tool(choice: NamedToolChoice) -> RequestError:
    return RequestError(f"tool_choice: there is no tool named {choice.function.name[:100]!r}.", param="tool_choice")


def _function(index: int, tool: Tool) -> Function:
    function, where = tool.function, f"tools[{index}].function"
    if not _NAME.fullmatch(function.name):
        raise RequestError(
            f"{where}.name: a name has 1 to 64 letters, digits, dots, dashes and underscores.", param=f"{where}.name"
        )
    parameters = function.parameters
    return Function(
        function.name,
        {"type": "object", "properties": {}} if parameters is None else parameters,
        function.strict is not False,
    )


def as_prompted(tool: Tool) -> dict[str, Any]:
    function = tool.function
    fields = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": {key: value for key, value in fields.items() if value is not None}}


def read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Read an earlier answer's `tool_calls`, arguments as objects for templates. Raises `RequestError`."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} must be a list.", param=where)
    return [_read_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _read_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise RequestError(f"{where} must be a call of a function.", param=where)
    if not isinstance(name := function.get("name"), str):
        raise RequestError(f"{where}.function.name must be a text.", param=f"{where}.function.name")
    call_id = call.get("id")
    if call_id is not None and not isinstance(call_id, str):
        raise RequestError(f"{where}.id must be a text.", param=f"{where}.id")
    arguments: Any = function.get("arguments", {})
    if isinstance(arguments, str):
        # What is no JSON are the model's own words, which its template may print as they are.
        with contextlib.suppress(msgspec.DecodeError, UnicodeError, RecursionError):
            arguments = msgspec.json.decode(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict | str):
        raise RequestError(f"{where}.function.arguments must be a text.", param=f"{where}.function.arguments")
    named = {} if call_id is None else {"id": call_id}
    return {**named, "type": "function", "function": {"name": name, "arguments": arguments}}


_PROMPT = """\
You may call one or more functions to assist with the user query. You are given function signatures within \
<tools></tools> tags:
<tools>
{tools}
</tools>
"""
_SAMPLE = '{{"name": <function-name>, "{key}": <args-json-object>}}'
_HOW = (
    "For each function call return a JSON object with function name and arguments within {begin}{end} tags:\n{sample}"
)
_HOW_BARE = "To call a function, answer with nothing but a JSON object with its name and arguments:\n{sample}"


def prompted(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], format_: AnswerFormat
) -> list[dict[str, Any]]:
    """Write tools into the system message, calls and results into the text, for a template without tools."""
    spelled = [_spelled(message, format_) for message in messages]
    if not tools:
        return spelled
    sample = _around(format_, _SAMPLE.format(key=format_.key))
    how = (_HOW_BARE if format_.bare else _HOW).format(begin=format_.call.begin, end=format_.call.end, sample=sample)
    prompt = _PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)) + how
    if spelled and spelled[0]["role"] == "system":
        return [{**spelled[0], "content": f"{spelled[0]['content']}\n\n{prompt}"}, *spelled[1:]]
    return [{"role": "system", "content": prompt}, *spelled]


def _around(format_: AnswerFormat, call: str) -> str:
    if format_.bare:
        return call
    return f"{format_.call.begin}{format_.pad}{call}{format_.pad}{format_.call.end}"


def _spelled(message: Mapping[str, Any], format_: AnswerFormat) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        function = call["function"]
        body = json.dumps({"name": function["name"], format_.key: function["arguments"]}, ensure_ascii=False)
        texts.append(_around(format_, body))
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}
