"""Calls of tools in streams cut anywhere, and the grammars that make a model write them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common import grammar
from cohort.common.grammar import GrammarTokens
from cohort.services.gateway.generation import tool_calls
from cohort.services.gateway.generation.answer_parts import CallDelta, whole_calls
from cohort.services.gateway.generation.tool_calls import ToolParser
from cohort.services.gateway.requests.tools import Function, ToolFormat, calls_grammar, prompted, tool_format
from tests.examples import examples
from tests.services.gateway.tiny_model import EOS, byte_level

HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>")
LLAMA = ToolFormat("llama3", "<|python_tag|>")
MISTRAL = ToolFormat("mistral", "[TOOL_CALLS]")
NAMED = ToolFormat("mistral", "[TOOL_CALLS]", named=True)

Calls = list[tuple[str, str]]

F1 = '{"name": "f", "arguments": {"x": "a\\"}<{", "y": [1, {}]}}'
F2 = '{"arguments": {"z": 1}, "name": "g.h"}'

CASES: list[tuple[ToolFormat, str, str, Calls]] = [
    (HERMES, "plain text", "plain text", []),
    (HERMES, " \n ", " \n ", []),
    (HERMES, "", "", []),
    (HERMES, f"<tool_call>\n{F1}\n</tool_call>", "", [("f", '{"x": "a\\"}<{", "y": [1, {}]}')]),
    (HERMES, f"Let me see. \n<tool_call>{F1}</tool_call>\n", "Let me see.", [("f", '{"x": "a\\"}<{", "y": [1, {}]}')]),
    (
        HERMES,
        f"<tool_call>\n{F1}\n</tool_call>\n<tool_call>\n{F2}\n</tool_call>",
        "",
        [("f", '{"x": "a\\"}<{", "y": [1, {}]}'), ("g.h", '{"z":1}')],
    ),
    (HERMES, "<tool_call>no json</tool_call> and", "<tool_call>no json</tool_call> and", []),
    (HERMES, "a <tool_cal and <tool", "a <tool_cal and <tool", []),
    (HERMES, '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": 1', "", [("f", '{"x": 1')]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>', "", [("f", '{"x": 1}')]),
    (LLAMA, "Hello {you}", "Hello {you}", []),
    (LLAMA, '{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (LLAMA, ' <|python_tag|>{"name": "f", "parameters": {"x": 1}}', "", [("f", '{"x": 1}')]),
    (
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"x": {}}}',
        "",
        [("f", "{}"), ("g", '{"x": {}}')],
    ),
    (LLAMA, '{"answer": {"deep": 1}} it is', '{"answer": {"deep": 1}} it is', []),
    (LLAMA, '{"open": [', '{"open": [', []),
    (LLAMA, "<|python", "<|python", []),
    (LLAMA, "<|pythonic|> no", "<|pythonic|> no", []),
    (MISTRAL, f"[TOOL_CALLS] [{F1}, {F2}]", "", [("f", '{"x": "a\\"}<{", "y": [1, {}]}'), ("g.h", '{"z":1}')]),
    (MISTRAL, "[TOOL_CALL] [1]", "[TOOL_CALL] [1]", []),
    (MISTRAL, "so [TOOL_CALLS][7]", "so [TOOL_CALLS][7]", []),
    (NAMED, '[TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}', "", [("f", '{"x": 1}'), ("g", "{}")]),
    (NAMED, '[TOOL_CALLS]f{"x": "]"}', "", [("f", '{"x": "]"}')]),
    (NAMED, "[TOOL_CALLS]f[ARGS]", "[TOOL_CALLS]f[ARGS]", []),
]


def read(format_: ToolFormat, parts: list[str], *, parallel: bool = True) -> tuple[str, list[CallDelta]]:
    reader = ToolParser(format_, parallel=parallel)
    found = [reader.feed(part) for part in parts]
    found.append(reader.finish())
    return "".join(each.content for each in found), [delta for each in found for delta in each.calls]


def told(format_: ToolFormat, parts: list[str], **options: bool) -> tuple[str, Calls]:
    content, deltas = read(format_, parts, **options)
    return content, [(call.name, call.arguments) for call in whole_calls(deltas)]


@pytest.mark.parametrize(("format_", "text", "content", "calls"), CASES)
def test_a_text_is_read_the_same_however_it_is_cut(format_: ToolFormat, text: str, content: str, calls: Calls) -> None:
    assert told(format_, [text]) == (content, calls)
    assert told(format_, list(text)) == (content, calls)
    for cut in range(len(text)):
        assert told(format_, [text[:cut], text[cut:]]) == (content, calls), cut


@settings(max_examples=examples(1))
@given(st.sampled_from([HERMES, LLAMA, MISTRAL, NAMED]), st.data())
def test_no_text_fails_a_reader_or_depends_on_its_cuts(format_: ToolFormat, data: st.DataObject) -> None:
    words = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "f", "arguments": {']
    words += ["{", "}", "[", "]", '"', "\\", ",", ":", " ", "\n", "f", '"parameters"', ";", F1, F2, '"\\x"']
    parts = data.draw(st.lists(st.sampled_from(words), max_size=12))
    text = "".join(parts)
    assert told(format_, parts) == told(format_, [text]) == told(format_, list(text))


def test_a_call_is_announced_before_its_arguments_are_complete_and_has_one_id() -> None:
    reader = ToolParser(HERMES, parallel=True)
    begun = reader.feed('<tool_call>{"name": "f", "arguments": {"x": "lo')
    assert [(call.index, call.name, call.arguments) for call in begun.calls] == [(0, "f", '{"x": "lo')]
    assert begun.calls[0].id.startswith("call_")
    more = reader.feed("ng")
    assert [(call.index, call.id, call.name, call.arguments) for call in more.calls] == [(0, "", "", "ng")]


def test_mistral_ids_are_what_its_templates_take() -> None:
    _, [call] = read(MISTRAL, [f"[TOOL_CALLS] [{F2}]"])
    assert len(call.id) == 9 and call.id.isalnum()


@pytest.mark.parametrize(
    ("format_", "text"),
    [
        (HERMES, f"<tool_call>{F2}</tool_call><tool_call>{F2}</tool_call>"),
        (LLAMA, '{"name": "g.h", "parameters": {"z":1}}; {"name": "g.h", "parameters": {"z":1}}'),
        (MISTRAL, f"[TOOL_CALLS] [{F2}, {F2}]"),
        (NAMED, '[TOOL_CALLS]g.h[ARGS]{"z":1}[TOOL_CALLS]g.h[ARGS]{"z":1}'),
    ],
)
def test_without_parallel_calls_the_first_is_the_last(format_: ToolFormat, text: str) -> None:
    reader = ToolParser(format_, parallel=False)
    found = reader.feed(text)
    assert [(call.name, call.arguments) for call in found.calls] == [("g.h", '{"z":1}')] and reader.ended
    assert len(told(format_, [text])[1]) == 2


@pytest.mark.parametrize("format_", [HERMES, MISTRAL])
def test_white_space_is_looked_at_once(format_: ToolFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = 0
    split = tool_calls._split

    def counted(text: str, marker: str) -> tuple[str, str, str]:
        nonlocal looked
        looked += len(text)
        return split(text, marker)

    monkeypatch.setattr(tool_calls, "_split", counted)
    blank = " \n" * 20_000
    assert told(format_, [f"a{blank}b{blank}", blank]) == (f"a{blank}b{blank}{blank}", [])
    assert looked == 3 * len(blank) + 2
    looked = 0
    assert told(format_, ["<tool_[TOOL" * 1000])[1] == []
    assert looked <= len(format_.marker) * 11_000


# -- Grammars ------------------------------------------------------------------------------------------------------

TOKENIZER = byte_level()
TOKENS = GrammarTokens(TOKENIZER.to_str(), [TOKENIZER.token_to_id(EOS)])
WEATHER = Function(
    "weather",
    {
        "type": "object",
        "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"City": {"type": "string"}},
    },
)
CLOCK = Function("clock", {"type": "object", "properties": {}})
W = {"city": "Köln", "days": 3}


def written(format_: ToolFormat, *calls: tuple[str, Any]) -> str:
    key = "parameters" if format_.family == "llama3" else "arguments"
    objects = [json.dumps({"name": name, key: arguments}, ensure_ascii=False) for name, arguments in calls]
    match format_.family:
        case "hermes":
            return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
        case "llama3":
            return "; ".join(objects)
        case "mistral" if format_.named:
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args, ensure_ascii=False)}" for name, args in calls)
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(objects)}]"


def accepts(format_: ToolFormat, text: str, functions: list[Function], *, parallel: bool) -> bool:
    matcher = TOKENS.compile(grammar.of_lark(calls_grammar(format_, functions, parallel=parallel)))
    try:
        matcher.take(TOKENS.tokens.tokenize_str(text))
    except grammar.GrammarError:
        return False
    return matcher.complete


@pytest.mark.parametrize("format_", [HERMES, LLAMA, MISTRAL, NAMED])
def test_required_calls_are_what_the_reader_reads(format_: ToolFormat) -> None:
    both = [WEATHER, CLOCK]
    one, two = written(format_, ("weather", W)), written(format_, ("weather", W), ("clock", {}))
    assert accepts(format_, one, both, parallel=True) and accepts(format_, two, both, parallel=True)
    assert accepts(format_, one, both, parallel=False) and not accepts(format_, two, both, parallel=False)
    assert not accepts(format_, one, [CLOCK], parallel=True)
    assert not accepts(format_, written(format_, ("weather", {"days": 1})), both, parallel=True)
    assert not accepts(format_, "I would rather not.", both, parallel=True)
    content, calls = told(format_, [two])
    assert not content and [(name, json.loads(arguments)) for name, arguments in calls] == [
        ("weather", W),
        ("clock", {}),
    ]


# -- Templates -----------------------------------------------------------------------------------------------------


def test_the_template_tells_the_family() -> None:
    def family(source: str | None) -> tuple[str, bool] | None:
        found = tool_format(source, {"<tool_call>": 7}.get)
        return None if found is None else (found.family, found.prompted)

    assert family(None) is None
    assert family("{{ messages }}") == ("hermes", True)
    assert family("{% if tools %}<tool_call>") == ("hermes", False)
    assert family("{% if tools %}[TOOL_CALLS]") == ("mistral", False)
    assert family("{% if tools %}<|python_tag|>") == ("llama3", False)
    assert family("{% if tools %}<tool_call><function=") is None
    assert family("{% if tools %}something else") is None
    found = tool_format("{% if tools %}<tool_call>", {"<tool_call>": 7}.get)
    assert found is not None and found.marker_ids == {7}
    assert "<[7]>" in calls_grammar(found, [CLOCK], parallel=True)


def test_a_template_without_tools_gets_them_as_text() -> None:
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "CET"}}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1"},
    ]
    made = prompted(chat, [{"type": "function", "function": {"name": "clock"}}])
    assert [message["role"] for message in made] == ["system", "user", "assistant", "user"]
    assert made[0]["content"].startswith("Be brief.\n\n") and '"name": "clock"' in made[0]["content"]
    assert told(HERMES, [made[2]["content"]]) == ("", [("clock", '{"zone": "CET"}')])
    assert made[3]["content"] == "<tool_response>\n12:00\n</tool_response>"
    assert prompted([chat[1]], []) == [chat[1]]
