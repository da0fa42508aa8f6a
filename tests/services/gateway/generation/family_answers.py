"""Answers of every family as its models write them, and what they say: for whatever reads or renders answers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cohort.services.gateway.generation.answer_parts import CallDelta, Part, Reasoning
from cohort.services.gateway.requests.formats import ROWS, AnswerFormat


@dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any]
    id: str = ""
    """What the model itself wrote as its id."""


@dataclass(frozen=True)
class Case:
    """`thinks`: what the prompt ends with is the mark that begins reasoning."""

    row: str
    text: str
    parts: tuple[str | Reasoning | Call, ...]
    thinks: bool = False


THOUGHT = Reasoning("Is it {raining}?\nI have a <tool_cal for that.")
T = THOUGHT.text
KOELN = Call("weather", {"city": 'Köln "]}', "days": 3})
CLOCK = Call("clock", {})
W = json.dumps(KOELN.arguments, ensure_ascii=False)
HERMES = f'<tool_call>\n{{"name": "weather", "arguments": {W}}}\n</tool_call>'
HERMES_CLOCK = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
CODER = '<tool_call>\n<function=weather>\n<parameter=city>\nKöln "]}\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>'  # noqa: E501
GLM = (
    '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Köln "]}</arg_value>\n<arg_key>days</arg_key>\n'
    "<arg_value>3</arg_value>\n</tool_call>"
)
NEXT = "<|start|>assistant"
TO_WEATHER = "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>"
ANALYSIS = f"<|channel|>analysis<|message|>{T}<|end|>"
SCHEMAS = {"weather": {"city": {"type": "string"}, "days": {"type": "integer"}}, "clock": {}}

CASES = [
    Case("hermes", f"<think>\n{T}\n</think>\n\nIt rains.", (THOUGHT, "It rains.")),
    Case("hermes", f"{T}\n</think>\n\n{HERMES}\n{HERMES_CLOCK}", (THOUGHT, KOELN, CLOCK), thinks=True),
    Case("hermes", f"Let me see.\n{HERMES}", ("Let me see.", KOELN)),
    Case("hermes", f"<think>\n\n</think>\n\n{HERMES}", (KOELN,)),
    Case("llama-3", f'{{"name": "weather", "parameters": {W}}}', (KOELN,)),
    Case(
        "llama-3",
        f'<|python_tag|>{{"name": "weather", "parameters": {W}}}; {{"name": "clock", "parameters": {{}}}}',
        (KOELN, CLOCK),
    ),
    Case("llama-3", f"<think>{T}</think>{{no call}}", (THOUGHT, "{no call}")),
    Case(
        "mistral", f'See:[TOOL_CALLS][{{"name": "weather", "arguments": {W}, "id": "ab"}}]', ("See:", KOELN)
    ),
    Case("mistral", f"[THINK]{T}[/THINK]It rains.", (THOUGHT, "It rains.")),
    Case("mistral-args", f"[TOOL_CALLS]weather[ARGS]{W}[TOOL_CALLS]clock[ARGS]{{}}", (KOELN, CLOCK)),
    Case("mistral-args", "[TOOL_CALLS]clock[CALL_ID]a1B2c3D4e[ARGS]{}", (Call("clock", {}, "a1B2c3D4e"),)),
    Case("gpt-oss", f"{ANALYSIS}{NEXT}<|channel|>final<|message|>It rains.<|return|>", (THOUGHT, "It rains.")),
    Case(
        "gpt-oss",
        f"{ANALYSIS}{NEXT}{TO_WEATHER}{W}<|call|>",
        (THOUGHT, KOELN),
    ),
    Case(
        "gpt-oss",
        f"<|channel|>commentary<|message|>Let me see.<|end|>{NEXT} to=functions.weather<|channel|>commentary"
        f" json<|message|>{W}<|call|>",
        ("Let me see.", KOELN),
    ),
    Case("qwen3-coder", f"I look.\n{CODER}", ("I look.", KOELN)),
    Case(
        "qwen3-coder",
        f"<think>\n{T}\n</think>\n{CODER}\n<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        (THOUGHT, KOELN, CLOCK),
    ),
    Case(
        "deepseek-v3",
        "See.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        f"{W}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{{}}\n```"
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        ("See.", KOELN, CLOCK),
    ),
    Case("deepseek-v3", f"{T}\n</think>\n\nIt rains.", (THOUGHT, "It rains."), thinks=True),
    Case(
        "deepseek-v3.1",
        f"{T}</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{W}<｜tool▁call▁end｜><｜tool▁call▁begin｜>"
        "clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        (THOUGHT, KOELN, CLOCK),
        thinks=True,
    ),
    Case("glm-4", f"\n<think>{T}</think>\n{GLM}\n<tool_call>clock\n</tool_call>", (THOUGHT, KOELN, CLOCK)),
    Case("glm-4", f"\n<think></think>\nI look.\n{GLM}", ("I look.", KOELN)),
    Case("phi-4", f'<|tool_call|>[{{"name": "weather", "arguments": {W}}}]<|/tool_call|>', (KOELN,)),
    Case("phi-4", f'<|tool_call|>{{"name": "weather", "arguments": {W}}}<|/tool_call|> Done.', (KOELN, " Done.")),
    Case("phi-4-system", '<|tool_call|>[{"name": "clock", "arguments": {}}]<|/tool_call|>', (CLOCK,)),
    Case("gemma-3", f'```tool_code\n{{"name": "weather", "parameters": {W}}}\n```', (KOELN,)),
    Case("gemma-3", f'{{"name": "weather", "parameters": {W}}}', (KOELN,)),
    Case("gemma-3", "```python\nprint({})\n```", ("```python\nprint({})\n```",)),
    Case("granite", f'<|tool_call|>[{{"name": "weather", "arguments": {W}}}, {{"name": "clock"}}]', (KOELN, CLOCK)),
    Case("granite", f"Here is my thought process:\n{T}\n\nHere is my response:\nIt rains.", (THOUGHT, "It rains.")),
    Case("granite-3.3", f"<think>{T}</think><response>It rains.</response>", (THOUGHT, "It rains.")),
    Case(
        "kimi-k2",
        "I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        f"{W}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
        "<|tool_calls_section_end|>",
        ("I look.", Call("weather", KOELN.arguments, "functions.weather:0"), Call("clock", {}, "functions.clock:1")),
    ),
    Case(
        "kimi-k2",
        f"<think>{T}<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>"
        "<|tool_call_end|><|tool_calls_section_end|>",
        (THOUGHT, Call("clock", {}, "functions.clock:0")),
    ),
    Case("think", f"<think>\n{T}\n</think>\n\nIt rains.", (THOUGHT, "It rains.")),
    Case("think", f"{T}</think>It <think> rains </think>.", (THOUGHT, "It <think> rains </think>."), thinks=True),
]  # fmt: skip


def row_of(name: str) -> AnswerFormat:
    """Return a row as a template with all its marks would have it."""
    if name == "granite-3.3":
        return _with_reasoning(row_of("granite"), 1)
    return _with_reasoning(next(row for row in ROWS if row.name == name), 0)


def _with_reasoning(row: AnswerFormat, place: int) -> AnswerFormat:
    return dataclasses.replace(row, reasoning=next(r for r in ROWS if r.name == row.name).reasoning[place : place + 1])


def merged(parts: Iterable[Part]) -> list[Any]:
    """Return the parts with neighbours of one kind joined: strings, `Reasoning`, and (name, arguments, id) of calls."""
    found: list[Any] = []
    for part in parts:
        last = found[-1] if found else None
        match part:
            case CallDelta() if part.id:
                found.append([part.name, part.arguments, part.id])
            case CallDelta():
                assert isinstance(last, list), "arguments belong to the call that began last"
                last[1] += part.arguments
            case Reasoning():
                if isinstance(last, Reasoning):
                    found[-1] = Reasoning(last.text + part.text)
                else:
                    found.append(part)
            case str():
                if isinstance(last, str):
                    found[-1] = last + part
                else:
                    found.append(part)
    return [tuple(each) if isinstance(each, list) else each for each in found]
