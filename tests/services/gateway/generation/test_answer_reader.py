"""Answers of all families, cut anywhere: the parts are always those of the uncut one."""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.services.gateway.generation.answer_parts import CallDelta, Part, Reasoning
from cohort.services.gateway.generation.answer_reader import AnswerReader
from cohort.services.gateway.requests.formats import CHANNELS, ROWS, AnswerFormat
from tests.examples import examples, nightly
from tests.services.gateway.generation.family_answers import CASES, SCHEMAS, Call, Case, merged, row_of

CUTS = 1_000_000
F1 = '{"name": "f", "arguments": {"x": "a\\"}<{", "y": [1, {}]}}'
F2 = '{"arguments": {"z": 1}, "name": "g.h"}'
A1 = '{"x": "a\\"}<{", "y": [1, {}]}'
FINAL = "<|channel|>final<|message|>"
Calls = list[tuple[str, str]]

ODD: list[tuple[str, str, str, Calls]] = [
    ("hermes", "plain text", "plain text", []),
    ("hermes", " \n ", " \n ", []),
    ("hermes", "", "", []),
    ("hermes", f"<tool_call>\n{F1}\n</tool_call>\n<tool_call>{F2}</tool_call>\n", "", [("f", A1), ("g.h", '{"z":1}')]),
    ("hermes", "<tool_call>no json</tool_call> and", "<tool_call>no json</tool_call> and", []),
    ("hermes", "a <tool_cal and <tool", "a <tool_cal and <tool", []),
    ("hermes", '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
    ("hermes", '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": {}</tool_call> x', " x", [("f", "{}")]),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    ("hermes", f"<tool_call> <tool_call>{F2}</tool_call>", f"<tool_call> <tool_call>{F2}</tool_call>", []),
    ("llama-3", "Hello {you}", "Hello {you}", []),
    ("llama-3", '{"answer": {"deep": 1}} it is', '{"answer": {"deep": 1}} it is', []),
    ("llama-3", '{"open": [', '{"open": [', []),
    ("llama-3", "<|python", "<|python", []),
    ("llama-3", "<|pythonic|> no", "<|pythonic|> no", []),
    ("llama-3", '{"name": "f", "parameters": {}} and', "and", [("f", "{}")]),
    ("mistral", f"[TOOL_CALLS] [{F1}, {F2}]", "", [("f", A1), ("g.h", '{"z":1}')]),
    ("mistral", "[TOOL_CALL] [1]", "[TOOL_CALL] [1]", []),
    ("mistral", "so [TOOL_CALLS][7]", "so [TOOL_CALLS][7]", []),
    ("mistral-args", '[TOOL_CALLS]f{"x": "]"}', "", [("f", '{"x": "]"}')]),
    ("mistral-args", "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]", []),
    ("gpt-oss", "no Harmony <|end|>", "no Harmony <|end|>", []),
    ("gpt-oss", "<|channel|>fin", "", []),
    ("gpt-oss", f"{FINAL}One.<|end|><|start|>assistant{FINAL}Two", "One.\nTwo", []),
    ("gpt-oss", '<|channel|>commentary to=functions.f<|message|>{"x": 1', "", [("f", '{"x": 1')]),
    ("kimi-k2", "<|tool_call_begin|>what?<|tool_call_end|>", "<|tool_call_begin|>what?<|tool_call_end|>", []),
    ("deepseek-v3.1", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>no", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>no", []),
    ("qwen3-coder", "<tool_call>\n<func", "<tool_call>\n<func", []),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=x>\n[1,", "", [("f", '{"x": "\\n[1,')]),
    ("qwen3-coder", "<tool_call><function=f><parameter=x>None</parameter></function>", "", [("f", '{"x": null}')]),
    ("qwen3-coder", '<tool_call><function=weather><parameter=city>a\n"b\n\n</parameter></function></tool_call>', "",
     [("weather", '{"city": "a\\n\\"b\\n"}')]),
    ("glm-4", "<tool_call>no name here</tool_call>", "<tool_call>no name here</tool_call>", []),
]  # fmt: skip


def reader(format_: AnswerFormat, *, thinks: bool = False, parallel: bool = True, calls: bool = True) -> AnswerReader:
    return AnswerReader(format_, calls=calls, parallel=parallel, ids="x", in_reasoning=thinks, schemas=SCHEMAS)


def read(format_: AnswerFormat, pieces: Sequence[str], **options: bool) -> list[Any]:
    reading = reader(format_, **options)
    parts: list[Part] = []
    for piece in pieces:
        parts += reading.feed(piece)
    return merged([*parts, *reading.finish()])


def content_and_calls(parts: Sequence[Any]) -> tuple[str, Calls]:
    calls = [(part[0], part[1]) for part in parts if isinstance(part, tuple)]
    return "".join(part for part in parts if isinstance(part, str)), calls


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = sorted({0, len(text), *places})
    return [text[begin:end] for begin, end in itertools.pairwise(ends)]


def seen(parts: Sequence[Any]) -> list[str | Reasoning | Call]:
    """Return the parts as a `Case` has them; an id that the reader made is "" there."""
    return [
        Call(part[0], json.loads(part[1]), part[2] if ":" in part[2] or len(part[2]) == 9 else "")
        if isinstance(part, tuple)
        else part
        for part in parts
    ]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.row}: {case.text[:12]!r}")
def test_a_familys_answer_is_read_the_same_however_it_is_cut(case: Case) -> None:
    row, text = row_of(case.row), case.text
    whole = read(row, [text], thinks=case.thinks)
    wanted = [Call(part.name, part.arguments, part.id) if isinstance(part, Call) else part for part in case.parts]
    if row.id_letters:
        assert all(len(part[2]) == 9 for part in whole if isinstance(part, tuple))
    found = seen(whole)
    assert [part if not isinstance(part, Call) or part.id in _ids(wanted) else Call(part.name, part.arguments)
            for part in found] == wanted  # fmt: skip
    assert read(row, list(text), thinks=case.thinks) == whole
    for place in range(len(text)):
        assert read(row, [text[:place], text[place:]], thinks=case.thinks) == whole, place


def _ids(parts: Sequence[Any]) -> set[str]:
    return {part.id for part in parts if isinstance(part, Call)}


@pytest.mark.parametrize(("row", "text", "content", "calls"), ODD)
def test_an_odd_text_is_read_the_same_however_it_is_cut(row: str, text: str, content: str, calls: Calls) -> None:
    for pieces in ([text], list(text), *(cut(text, [place]) for place in range(len(text)))):
        assert content_and_calls(read(row_of(row), pieces)) == (content, calls), pieces


def words_of(row: AnswerFormat) -> list[str]:
    words = [text for text in row.texts() if text] + [case.text for case in CASES if case.row == row.name]
    words += ["<function=f>", "<parameter=x>", "</parameter>", "</function>", '{"name": "f", "arguments": {', *CHANNELS]
    return [
        *words,
        *'{}[]"\\,: \n',
        "f",
        '"parameters"',
        ";",
        F1,
        F2,
        '"\\x"',
        "analysis",
        "to=functions.f",
        "functions.f:0",
    ]


@settings(max_examples=examples(3))
@given(st.sampled_from([row_of(row.name) for row in ROWS]), st.booleans(), st.booleans(), st.data())
def test_no_text_fails_a_reader_or_depends_on_its_cuts(
    row: AnswerFormat, thinks: bool, parallel: bool, data: st.DataObject
) -> None:
    pieces = data.draw(st.lists(st.sampled_from(words_of(row)), max_size=12))
    text = "".join(pieces)
    places = data.draw(st.lists(st.integers(0, len(text)), max_size=8))
    whole = read(row, [text], thinks=thinks, parallel=parallel)
    for parts in (pieces, list(text), cut(text, places)):
        assert read(row, parts, thinks=thinks, parallel=parallel) == whole
    if not any(isinstance(part, tuple) for part in whole):  # nothing is lost but marks and white space
        left = "".join(part.text if isinstance(part, Reasoning) else part for part in whole)
        assert len(left) <= len(text) + text.count("\n") + 12


def test_random_cuts_change_nothing() -> None:
    """A million of them nightly, or as many as COHORT_CUTS says; each of 1 to 12 places."""
    count = int(os.environ.get("COHORT_CUTS") or (CUTS if nightly() else 2_000))
    drawn = random.Random(None if nightly() else 1)
    known = [(case, row_of(case.row), read(row_of(case.row), [case.text], thinks=case.thinks)) for case in CASES]
    for number in range(count):
        case, row, whole = known[number % len(known)]
        places = [drawn.randrange(len(case.text)) for _ in range(drawn.randint(1, 12))]
        assert read(row, cut(case.text, places), thinks=case.thinks) == whole, (case, places)


def test_a_call_is_announced_before_its_arguments_are_complete_and_has_one_id() -> None:
    reading = reader(row_of("hermes"))
    [begun] = reading.feed('<tool_call>{"name": "f", "arguments": {"x": "lo')
    assert isinstance(begun, CallDelta) and begun.id.startswith("call_")
    assert (begun.index, begun.name, begun.arguments) == (0, "f", '{"x": "lo')
    assert reading.feed("ng") == [CallDelta(0, arguments="ng")]


def test_a_tagged_text_comes_as_it_is_written_and_another_value_when_it_is_whole() -> None:
    reading = reader(row_of("qwen3-coder"))
    reading.feed("<tool_call>\n<function=weather>\n<parameter=city>\n")
    assert reading.feed('Kö"') == [CallDelta(0, arguments='Kö\\"')]
    assert reading.feed("\n</parameter>\n<parameter=days>\n12") == [CallDelta(0, arguments='", "days": ')]
    assert reading.feed("\n</parameter>") == [CallDelta(0, arguments="12")]


def test_reasoning_comes_as_it_is_written() -> None:
    reading = reader(row_of("hermes"))
    assert reading.feed("<think>\nWell") == [Reasoning("Well")] and reading.in_reasoning
    assert reading.feed(", \n") == [Reasoning(",")]
    assert reading.feed("yes </th") == [Reasoning(" \nyes")]
    assert reading.feed("ink>\n\nSo") == ["So"] and not reading.in_reasoning


def test_after_reasoning_an_answer_without_tools_is_plain() -> None:
    reading = reader(row_of("hermes"), calls=False)
    reading.feed("<think>a</think>")
    assert not reading.is_plain
    assert reading.feed(" b <tool_call>") == ["b <tool_call>"] and reading.is_plain


def test_mistral_ids_are_what_its_templates_take() -> None:
    [call] = read(row_of("mistral"), [f"[TOOL_CALLS] [{F2}]"])
    assert len(call[2]) == 9 and call[2].isalnum()


@pytest.mark.parametrize("case", [case for case in CASES if sum(isinstance(each, Call) for each in case.parts) > 1],
                         ids=lambda case: case.row)  # fmt: skip
def test_without_parallel_calls_the_first_is_the_last(case: Case) -> None:
    row = row_of(case.row)
    reading = reader(row, thinks=case.thinks, parallel=False)
    found = merged(reading.feed(case.text))
    assert len([part for part in found if isinstance(part, tuple)]) == 1 and reading.ended
    assert found == read(row, [case.text], thinks=case.thinks)[: len(found)]


@pytest.mark.parametrize("name", ["hermes", "granite", "kimi-k2"])
def test_what_is_held_of_a_call_is_bounded(name: str) -> None:
    row = row_of(name)
    text = row.call.begin + "{" + " " * 70_000
    reading = reader(row)
    given_back = reading.feed(text)
    assert given_back and all(isinstance(part, str) for part in given_back)
    assert "".join(map(str, [*given_back, *reading.finish()])) == text
