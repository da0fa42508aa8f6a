"""The grammar that an answer is bound to: calls of tools as its model writes them, an answer's own form, or both.

    start: calls | answer

Made of a row of `formats.py` and the functions' schemas, in llguidance's Lark. Called by `tools.py` and `parsing.py`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cohort.common import grammar, json_schemas
from cohort.services.gateway.requests.formats import CHANNEL, CONSTRAIN, MESSAGE, START, AnswerFormat, Tags
from cohort.services.gateway.text.grammar_process import GrammarSpec

_INDEX = "{index}"


@dataclass(frozen=True, slots=True)
class Function:
    """A tool. `parameters`: the JSON schema of its arguments, whose objects close if `closes`."""

    name: str
    parameters: dict[str, Any]
    closes: bool = True


def bound(
    format_: AnswerFormat, functions: Sequence[Function], *, parallel: bool, answer: GrammarSpec | None = None
) -> str:
    """Return the grammar of calls of these functions, one or more, and of the answer's own form instead of them.
    Raises `ValueError` for a form that a client wrote as a grammar, which cannot be joined."""
    rules: list[str] = []
    ways: list[str] = []
    if functions:
        ways.append("calls")
        rules += _calls(format_, functions, parallel=parallel)
    if answer is not None:
        ways.append("answer")
        rules.append(f"answer: {_form(answer)}")
    if format_.body == "channels":
        if answer is not None:
            ways[-1] = f"{_literal(format_, f'{CHANNEL}final{MESSAGE}')} answer"
        return "\n".join(
            [f"start: begun? ({' | '.join(ways)})", f"begun: {_literal(format_, f'{START}assistant')}", *rules, ""]
        )
    return "\n".join([f"start: {' | '.join(ways)}", *rules, ""])


def _form(answer: GrammarSpec) -> str:
    match answer.kind:
        case "json_schema" | "open_json_schema":
            return f"%json {_bounded(answer.content, closes=answer.kind == 'json_schema')}"
        case "choice":
            return " | ".join(map(grammar.quoted, answer.content))
        case "regex":
            return "/" + re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", answer.content) + "/"
        case other:
            raise ValueError(f"a form that is a {other} cannot be joined with calls")


def _calls(format_: AnswerFormat, functions: Sequence[Function], *, parallel: bool) -> list[str]:
    call, rules = format_.call, list[str]()
    many = "calls: {0} ({1} {0})*" if parallel and format_.body != "channels" else "calls: {0}"
    between = _literal(format_, format_.between)
    begin, end = _literal(format_, call.begin + format_.pad), _literal(format_, format_.pad + call.end)
    if format_.listed:
        rules += [f'calls: {begin} "[" listed "]" {end}', many.format("call", '", "').replace("calls:", "listed:")]
    elif format_.bare or format_.body == "channels":
        rules.append(many.format("call", between))
    else:
        section = format_.section
        rules += [many.format("marked", between).replace("calls:", "each:"), f"marked: {begin} call {end}"]
        rules.append(f"calls: {_literal(format_, section.begin)} each {_literal(format_, section.end)}")
    rules.append("call: " + " | ".join(f"call{index}" for index in range(len(functions))))
    for index, function in enumerate(functions):
        rules += _call(format_, index, function)
    if format_.written.end.startswith(":" + _INDEX):
        rules.append("INDEX: /[0-9]{1,3}/")
    return rules


def _call(format_: AnswerFormat, index: int, function: Function) -> list[str]:
    name = function.name
    match format_.body:
        case "tags":
            assert format_.tags is not None
            return _tagged(format_, format_.tags, index, function)
        case "named":
            written = format_.written
            before, after = _literal(format_, f"{written.begin}{name}{written.end}"), _literal(format_, format_.tail)
        case "channels":
            header = f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}"
            before, after = _literal(format_, header), ""
        case _ if format_.bare:
            return [f"call{index}: %json {_bounded(_whole_call(format_, function), closes=function.closes)}"]
        case _:
            before = grammar.quoted(f'{{"name": {json.dumps(name)}, {json.dumps(format_.key)}: ')
            after = grammar.quoted("}")
    arguments = _bounded(function.parameters, closes=function.closes)
    return [f"call{index}: {before} args{index} {after}", f"args{index}: %json {arguments}"]


def _whole_call(format_: AnswerFormat, function: Function) -> dict[str, Any]:
    """Return the schema of a call without marks. Its text and an answer's form begin alike, so both have to be JSON: a
    literal would hide the form from the library's lexer."""
    properties = {"name": {"const": function.name}, format_.key: function.parameters}
    shared = {"$defs": defs} if (defs := function.parameters.get("$defs")) else {}
    closed = {"properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "object", **closed, **shared}


def _tagged(format_: AnswerFormat, tags: Tags, index: int, function: Function) -> list[str]:
    """Return the rules of a call whose arguments have tags: in their schema's order, those that are required."""
    properties = function.parameters.get("properties") or {}
    required, shared = function.parameters.get("required") or (), function.parameters.get("$defs")
    rules, parts = list[str](), list[str]()
    for place, (key, schema) in enumerate(properties.items()):
        rule = f"arg{index}_{place}"
        begin = _literal(format_, tags.key.begin + key + tags.key.end + tags.value.begin)
        newline = "" if tags.value.begin else '"\\n"'
        if isinstance(schema, dict) and schema.get("type") == "string" and "enum" not in schema:
            end = tags.value.end
            if (end_id := format_.ids.get(end.strip())) is not None:
                value = f"text{index}_{place} <[{end_id}]>"
                rules.append(f"text{index}_{place}: /(.|\\n)*/")
            else:
                value = f"text{index}_{place}"
                rules.append(f"text{index}_{place}[suffix={grammar.quoted(end)}]: /(.|\\n)*/")
        else:
            whole = {"$defs": shared, **schema} if shared and isinstance(schema, dict) else schema
            rules.append(f"text{index}_{place}: %json {_bounded(whole, closes=function.closes)}")
            value = f"text{index}_{place} {_literal(format_, tags.value.end)}"
        rules.append(f'{rule}: {begin} {newline} {value} "\\n"')
        parts.append(rule if key in required else f"{rule}?")
    name = _literal(format_, tags.name.begin + function.name + tags.name.end)
    return [f"call{index}: {name} {' '.join(parts)} {_literal(format_, tags.end)}", *rules]


def _literal(format_: AnswerFormat, text: str) -> str:
    """Return a text as Lark, with the marks in it that are tokens of their own as those."""
    found = []
    pattern = "|".join(re.escape(mark) for mark in (*sorted(format_.ids, key=len, reverse=True), _INDEX))
    for part in re.split(f"({pattern})", text):
        if part == _INDEX:
            found.append("INDEX")
        elif part in format_.ids:
            found.append(f"<[{format_.ids[part]}]>")
        elif part:
            found.append(grammar.quoted(part))
    return " ".join(found)


def _bounded(schema: Any, *, closes: bool) -> str:
    """Return a schema as JSON, bounded as `grammar.of_json_schema` does it for a schema alone."""
    if not isinstance(schema, dict):
        return json.dumps(schema)
    return json.dumps(grammar.with_white_space(json_schemas.ending(schema, closes=closes)))
