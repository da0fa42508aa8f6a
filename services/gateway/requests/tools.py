"""The tools of a chat: how its model writes calls, which it may and which it must call, and how earlier calls are read.

The marks in the chat template's source tell the family. A template without a place for tools gets them in a system
message in Hermes' form, which many small models have seen; one with an unknown form refuses tools. `tool_choice` none
leaves the tools out; required and a named function bind the answer by a grammar; with auto, what the model writes is
read (`tool_calls.py`). Pure; called by `service.py` and `parsing.py`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from cohort.common import grammar
from cohort.common.errors import RequestError
from cohort.services.gateway import bounds
from cohort.services.gateway.http.bodies import ChatBody, NamedToolChoice, Tool
from cohort.services.gateway.text.grammar_process import GrammarSpec

Family = Literal["hermes", "llama3", "mistral"]
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Form of tool calls: from `marker` to `close` ("" = ends by itself); `named`: Mistral's with [ARGS]. `prompted`:
    tools go into a system message. `marker_id`, `close_id`: the marks' own tokens."""

    family: Family
    marker: str
    close: str = ""
    named: bool = False
    prompted: bool = False
    marker_id: int | None = None
    close_id: int | None = None
    args_id: int | None = None

    @property
    def marker_ids(self) -> frozenset[int]:
        """Tokens that must be readable in the text although they are special ones."""
        return frozenset(each for each in (self.marker_id, self.close_id, self.args_id) if each is not None)


@dataclass(frozen=True, slots=True)
class Function:
    """A tool. `parameters`: the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any]


def tool_format(template: str | None, token_id: Callable[[str], int | None]) -> ToolFormat | None:
    """Return the form of tool calls in a chat template's source; `token_id` finds an added token. None if unknown."""
    if template is None:
        return None
    if "tools" not in template:
        return _with_ids(ToolFormat("hermes", "<tool_call>", "</tool_call>", prompted=True), token_id)
    if "[TOOL_CALLS]" in template:
        return _with_ids(ToolFormat("mistral", "[TOOL_CALLS]", named="[ARGS]" in template), token_id)
    if "<tool_call>" in template and "<function=" not in template and "<arg_key>" not in template:
        return _with_ids(ToolFormat("hermes", "<tool_call>", "</tool_call>"), token_id)
    if "<|python_tag|>" in template or ("ipython" in template and '"parameters"' in template):
        return _with_ids(ToolFormat("llama3", "<|python_tag|>"), token_id)
    return None


def _with_ids(format_: ToolFormat, token_id: Callable[[str], int | None]) -> ToolFormat:
    return ToolFormat(
        format_.family,
        format_.marker,
        format_.close,
        format_.named,
        format_.prompted,
        token_id(format_.marker),
        token_id(format_.close) if format_.close else None,
        token_id("[ARGS]") if format_.named else None,
    )


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of one request: `prompt` as the template gets them, `grammar_spec` the calls that the answer is bound
    to."""

    format: ToolFormat
    prompt: tuple[dict[str, Any], ...]
    parallel: bool
    grammar_spec: GrammarSpec | None


def tool_use(body: ChatBody, format_: ToolFormat | None) -> ToolUse | None:
    """Return the tools, or None if no call is to be read. Raises `RequestError`."""
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
    wanted = GrammarSpec("lark", calls_grammar(format_, callable_, parallel=parallel), "tools") if callable_ else None
    return ToolUse(format_, tuple(as_prompted(tool) for tool in tools), parallel, wanted)


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


def calls_grammar(format_: ToolFormat, functions: Sequence[Function], *, parallel: bool) -> str:
    """Return the Lark grammar for one call of these functions, or for one and more."""
    marker, close = _mark(format_.marker, format_.marker_id), _mark(format_.close, format_.close_id)
    key = "parameters" if format_.family == "llama3" else "arguments"
    rules = []
    for index, function in enumerate(functions):
        if format_.named:
            args = _mark("[ARGS]", format_.args_id)
            rules.append(f"call{index}: {grammar.quoted(function.name)} {args} args{index}")
        else:
            head = grammar.quoted(f'{{"name": {json.dumps(function.name)}, "{key}": ')
            rules.append(f'call{index}: {head} args{index} "}}"')
        rules.append(f"args{index}: %json {json.dumps(_bounded(function.parameters))}")
    one = "call: " + " | ".join(f"call{index}" for index in range(len(functions)))
    match format_.family:
        case "hermes":
            lines = [_start("marked", " NEXT ", parallel), f"marked: {marker} NEXT call NEXT {close}", 'NEXT: "\\n"']
        case "llama3":
            lines = [_start("call", ' "; " ', parallel)]
        case "mistral" if format_.named:
            lines = [_start("marked", " ", parallel), f"marked: {marker} call"]
        case "mistral":
            lines = [f'start: {marker} "[" calls "]"', _start("call", ' ", " ', parallel, rule="calls")]
    return "\n".join([*lines, one, *rules, ""])


def _start(what: str, between: str, parallel: bool, rule: str = "start") -> str:
    return f"{rule}: {what} ({between.strip()} {what})*" if parallel else f"{rule}: {what}"


def _mark(text: str, token_id: int | None) -> str:
    return f"<[{token_id}]>" if token_id is not None else grammar.quoted(text)


def _bounded(schema: dict[str, Any]) -> dict[str, Any]:
    # As `grammar.of_json_schema` does it for a schema alone.
    return {"x-guidance": {"whitespace_pattern": grammar.WHITE_SPACE}, **schema}


_PROMPT = """\
You may call one or more functions to assist with the user query. You are given function signatures within \
<tools></tools> tags:
<tools>
{tools}
</tools>
For each function call return a JSON object with function name and arguments within <tool_call></tool_call> tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def prompted(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Write tools into the system message, calls and results into the text, for a template without tools."""
    spelled = [_spelled(message) for message in messages]
    if not tools:
        return spelled
    prompt = _PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if spelled and spelled[0]["role"] == "system":
        return [{**spelled[0], "content": f"{spelled[0]['content']}\n\n{prompt}"}, *spelled[1:]]
    return [{"role": "system", "content": prompt}, *spelled]


def _spelled(message: Mapping[str, Any]) -> dict[str, Any]:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return dict(message)
    texts = [message["content"]] if message["content"] else []
    for call in calls:
        function = call["function"]
        body = json.dumps({"name": function["name"], "arguments": function["arguments"]}, ensure_ascii=False)
        texts.append(f"<tool_call>\n{body}\n</tool_call>")
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(texts)}
