"""Grammars that make a model write calls, or an answer of a form, as its family writes them."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from cohort.common import grammar
from cohort.common.grammar import GrammarTokens
from cohort.services.gateway.generation.answer_reader import AnswerReader
from cohort.services.gateway.requests.call_grammars import Function, bound
from cohort.services.gateway.requests.formats import ROWS, START, AnswerFormat
from cohort.services.gateway.text.grammar_process import GrammarSpec
from tests.services.gateway.generation.family_answers import CASES, Call, Case, merged, row_of
from tests.services.gateway.tiny_model import EOS, byte_level

TOKENIZER = byte_level()
TOKENS = GrammarTokens(TOKENIZER.to_str(), [TOKENIZER.token_to_id(EOS)])
WEATHER = Function(
    "weather",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    },
)
CLOCK = Function("clock", {"type": "object", "properties": {}})
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
FORM = GrammarSpec("json_schema", SCHEMA, "response_format")


def accepts(format_: AnswerFormat, text: str, functions: list[Function], **options: Any) -> bool:
    matcher = TOKENS.compile(grammar.of_lark(bound(format_, functions, **{"parallel": True, **options})))
    try:
        matcher.take(TOKENS.tokens.tokenize_str(text))
    except grammar.GrammarError:
        return False
    return matcher.complete


def with_ids(name: str) -> AnswerFormat:
    """Return a row with the mark that this tokenizer has as a token."""
    return dataclasses.replace(row_of(name), ids={START: TOKENIZER.token_to_id(START)})


def calls_alone(case: Case) -> bool:
    return all(isinstance(part, Call) for part in case.parts)


def canonical(name: str, *calls: Call) -> str:
    """Return calls as the family's template writes them."""
    row = row_of(name)
    found = []
    for number, call in enumerate(calls):
        arguments = json.dumps(call.arguments, ensure_ascii=False)
        match row.body:
            case "named":
                head = f"{row.written.begin}{call.name}{row.written.end}".replace("{index}", str(number))
                found.append(f"{row.call.begin}{head}{arguments}{row.tail}{row.call.end}")
            case "channels":
                header = f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
                found.append(f"<|start|>assistant{header}{arguments}")
            case "tags":
                assert row.tags is not None
                newline = "" if row.tags.value.begin else "\n"
                values = [
                    f"{row.tags.key.begin}{key}{row.tags.key.end}{row.tags.value.begin}{newline}{value}{row.tags.value.end}\n"
                    for key, value in call.arguments.items()
                ]
                name_ = f"{row.tags.name.begin}{call.name}{row.tags.name.end}"
                found.append(f"{row.call.begin}{name_}{''.join(values)}{row.tags.end}{row.call.end}")
            case _:
                body = f'{{"name": "{call.name}", "{row.key}": {arguments}}}'
                plain = row.bare or row.listed
                found.append(body if plain else f"{row.call.begin}{row.pad}{body}{row.pad}{row.call.end}")
    if row.listed:
        return f"{row.call.begin}[{', '.join(found)}]{row.call.end}"
    return row.section.begin + row.between.join(found) + row.section.end


ONE, TWO = Call("weather", {"city": "Köln", "days": 3}), Call("clock", {})


@pytest.mark.parametrize("name", dict.fromkeys(row.name for row in ROWS))
def test_required_calls_are_what_the_reader_reads(name: str) -> None:
    row, both = with_ids(name), [WEATHER, CLOCK]
    one, two = canonical(name, ONE), canonical(name, ONE, TWO)
    assert accepts(row, one, both) and accepts(row, one, both, parallel=False)
    assert accepts(row, two, both) is (row.body != "channels")
    assert not accepts(row, two, both, parallel=False)
    assert not accepts(row, one, [CLOCK])
    assert not accepts(row, canonical(name, Call("weather", {"days": 1})), both)
    assert not accepts(row, "I would rather not.", both)
    for text, calls in ((one, [ONE]), (two, [ONE, TWO])):
        if row.body != "channels" or len(calls) == 1:
            reader = AnswerReader(row, calls=True, schemas={"weather": WEATHER.parameters["properties"]})
            parts = merged([*reader.feed(text), *reader.finish()])
            assert [Call(part[0], json.loads(part[1])) for part in parts] == calls


@pytest.mark.parametrize("name", dict.fromkeys(row.name for row in ROWS))
def test_a_form_beside_tools_is_an_answer_that_calls_none(name: str) -> None:
    row = with_ids(name)
    final = "<|channel|>final<|message|>" if row.body == "channels" else ""
    one = canonical(name, ONE)
    assert accepts(row, one, [WEATHER], answer=FORM) and accepts(row, f'{final}{{"a": 1}}', [WEATHER], answer=FORM)
    assert not accepts(row, f'{final}{{"b": 1}}', [WEATHER], answer=FORM)
    assert not accepts(row, f'{final}{{"a": 1}}', [WEATHER])
    assert not accepts(row, one, [], answer=FORM) and accepts(row, f'{final}{{"a": 1}}', [], answer=FORM)


def test_other_forms_are_joined_but_not_a_grammar() -> None:
    row = row_of("hermes")
    for spec, good, bad in (
        (GrammarSpec("choice", ["yes", 'a "no"'], "guided_choice"), 'a "no"', "maybe"),
        (GrammarSpec("regex", r"a/[0-9]+\/", "guided_regex"), "a/12/", "a/b/"),
    ):
        assert accepts(row, good, [CLOCK], answer=spec) and not accepts(row, bad, [CLOCK], answer=spec)
    with pytest.raises(ValueError, match="cannot be joined"):
        bound(row, [CLOCK], parallel=True, answer=GrammarSpec("grammar", "start: /x/", "guided_grammar"))


def test_marks_that_are_tokens_are_those_tokens() -> None:
    hermes = dataclasses.replace(row_of("hermes"), ids={"<tool_call>": 7})
    kimi = dataclasses.replace(row_of("kimi-k2"), ids={"<|tool_call_argument_begin|>": 9})
    assert "<[7]>" in bound(hermes, [CLOCK], parallel=True)
    assert '"functions.clock:" INDEX <[9]>' in bound(kimi, [CLOCK], parallel=True)


def test_arguments_may_refer_to_shared_definitions() -> None:
    days = {"properties": {"days": {"$ref": "#/$defs/D"}}, "required": ["days"], "additionalProperties": False}
    function = Function("weather", {"type": "object", **days, "$defs": {"D": {"type": "integer"}}})
    for name in ("llama-3", "hermes", "glm-4", "qwen3-coder"):
        assert accepts(row_of(name), canonical(name, Call("weather", {"days": 3})), [function])
        assert not accepts(row_of(name), canonical(name, Call("weather", {"days": "x"})), [function])


def test_what_templates_write_is_what_grammars_allow() -> None:
    """The recorded answers that are calls alone: of every family at least one is as the grammar has it."""
    found = {case.row for case in CASES if calls_alone(case) and accepts(row_of(case.row), case.text, [WEATHER, CLOCK])}
    assert found >= {"llama-3", "gemma-3", "mistral-args"}
