"""The tools of a chat: which the model may call, which it must, and how messages of earlier calls are read.

Pure; called by `parsing.py`. `tool_choice` none leaves the tools out of the prompt; required and a named function bind
the answer to calls by a grammar; with auto the model writes what it likes, and what it writes is read.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.services.gateway.http.bodies import ChatBody, NamedToolChoice, Tool
from cohort.services.gateway.requests.tool_formats import Function, ToolFormat, calls_grammar
from cohort.services.gateway.text.grammar_process import Wanted

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Of one request. `prompt`: the tools as the template gets them. `wanted`: the calls that the answer is bound to,
    if it is."""

    format: ToolFormat
    prompt: tuple[dict[str, Any], ...]
    parallel: bool
    wanted: Wanted | None


def tool_use(body: ChatBody, config: GatewayConfig, format_: ToolFormat | None) -> ToolUse | None:
    """None: no call is read in the answer. Raises `RequestError`."""
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if choice not in (None, "none", "auto"):
            raise RequestError("tool_choice: there are no tools to choose from.", param="tool_choice")
        return None
    functions = [_function(index, tool) for index, tool in enumerate(_few_enough(tools, config))]
    names = [function.name for function in functions]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise RequestError(f"tools: two functions are named {twice!r}.", param="tools")
    if choice == "none":
        return None
    if format_ is None:
        raise RequestError(
            "tools: this model's chat template has calls of tools in a form that is not read here.", param="tools"
        )
    parallel = body.parallel_tool_calls is not False
    match choice:
        case None | "auto":
            callable_: Sequence[Function] = ()
        case "required":
            callable_ = functions
        case NamedToolChoice():
            callable_ = [function for function in functions if function.name == choice.function.name]
            parallel = False
            if not callable_:
                raise RequestError(
                    f"tool_choice: there is no tool named {choice.function.name[:100]!r}.", param="tool_choice"
                )
        case other:
            raise RequestError(
                f"tool_choice: {str(other)[:100]!r} is none of 'auto', 'required', 'none' and a function.",
                param="tool_choice",
            )
    wanted = Wanted("lark", calls_grammar(format_, callable_, parallel=parallel), "tools") if callable_ else None
    return ToolUse(format_, tuple(as_prompted(tool) for tool in tools), parallel, wanted)


def _few_enough(tools: list[Tool], config: GatewayConfig) -> list[Tool]:
    if len(tools) > config.max_tools:
        raise RequestError(
            f"tools: there are {len(tools)}, but at most {config.max_tools} are read (gateway.max_tools).",
            param="tools",
        )
    return tools


def _function(index: int, tool: Tool) -> Function:
    function, where = tool.function, f"tools[{index}].function"
    if not _NAME.fullmatch(function.name):
        raise RequestError(
            f"{where}.name: a name has 1 to 64 letters, digits, dots, dashes and underscores.", param=f"{where}.name"
        )
    parameters = function.parameters
    return Function(function.name, {"type": "object", "properties": {}} if parameters is None else parameters)


def as_prompted(tool: Tool) -> dict[str, Any]:
    function = tool.function
    told = {"name": function.name, "description": function.description, "parameters": function.parameters}
    return {"type": "function", "function": {key: value for key, value in told.items() if value is not None}}


def read_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """The `tool_calls` of an earlier answer, arguments as the object that templates expect. Raises `RequestError`."""
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
