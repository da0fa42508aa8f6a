"""Which family a chat template is of, and what is found of its marks; tools as text for a template without them."""

from __future__ import annotations

import pytest

from cohort.common.errors import ModelError
from cohort.services.gateway.generation.answer_reader import AnswerReader
from cohort.services.gateway.requests.formats import NAMES, ROWS, Marks, answer_format
from cohort.services.gateway.requests.tools import prompted, with_tools
from tests.services.gateway.generation.family_answers import row_of

T = "{% if tools %}"
TOOL = {"type": "function", "function": {"name": "clock"}}


@pytest.mark.parametrize(
    ("template", "name", "place", "reads"),
    [
        ("{{ messages }}", "think", "text", True),
        (f"{T}<tool_call>", "hermes", "variable", True),
        (f"{T}[TOOL_CALLS]", "mistral", "variable", True),
        (f"{T}[TOOL_CALLS]x[ARGS]", "mistral-args", "variable", True),
        (f"{T}<|python_tag|>", "llama-3", "variable", True),
        (f'{T}ipython {{"parameters"', "llama-3", "variable", True),
        (f"{T}<tool_call><function=x><parameter=y>", "qwen3-coder", "variable", True),
        (f"{T}<tool_call><arg_key><arg_value>", "glm-4", "variable", True),
        (f"{T}<｜tool▁calls▁begin｜>```json", "deepseek-v3", "variable", True),
        (f"{T}<｜tool▁calls▁begin｜>", "deepseek-v3.1", "variable", True),
        (f"{T}<|tool_calls_section_begin|>", "kimi-k2", "variable", True),
        (f"{T}<|tool_call|><|/tool_call|>", "phi-4", "variable", True),
        ("<|tool|>' + message['tools'] + '<|/tool|>", "phi-4-system", "system", True),
        (f"{T}<|tool_call|>", "granite", "variable", True),
        (f"{T}<|channel|><|message|>", "gpt-oss", "variable", True),
        ("<|channel|><|message|>", "gpt-oss", "text", False),
        ("<start_of_turn>", "gemma-3", "text", True),
        (f"{T}something else", "think", "text", False),
    ],
)
def test_the_template_tells_the_family(template: str, name: str, place: str, reads: bool) -> None:
    found = answer_format(template, {}.get)
    assert found is not None and (found.name, found.place, found.reads_calls) == (name, place, reads)


def test_an_option_overrides_it() -> None:
    assert answer_format(None, {}.get) is None
    found = answer_format(f"{T}something else", {}.get, "hermes")
    assert found is not None and found.name == "hermes" and found.reads_calls
    with pytest.raises(ModelError, match="none of auto, gpt-oss, kimi-k2"):
        answer_format("x", {}.get, "qwen")
    assert len(NAMES) >= 14


def test_reasoning_needs_its_mark_in_the_template_or_the_tokenizer() -> None:
    for template, ids in ((f"{T}<tool_call>", {"</think>": 8}), (f"{T}<tool_call></think>", {})):
        found = answer_format(template, ids.get)
        assert found is not None and found.reasoning == (Marks("<think>", "</think>"),)
    found = answer_format(f"{T}<tool_call>", {}.get)
    assert found is not None and not found.reasoning and answer_format(f"{T}<|tool_call|>", {}.get).dropped == ()  # type: ignore[union-attr]


def test_special_marks_stay_in_the_text() -> None:
    ids = {"<tool_call>": 7, "</tool_call>": 8, "</think>": 9}
    found = answer_format(f"{T}<tool_call></think>", ids.get)
    assert found is not None and found.call_mark_ids == {7, 8, 9} and found.reasoning_mark_ids == {9}
    kimi = answer_format(f"{T}<|tool_calls_section_begin|>", {"<|tool_call_argument_begin|>": 5}.get)
    assert kimi is not None and kimi.call_mark_ids == {5}


@pytest.mark.parametrize(
    ("prompt", "where"),
    [
        ("a<think>\n", "begun"),
        ("<think>\n\n</think>\n\n", "ended"),
        ("a</think>", "ended"),
        ("<think> b", ""),
        ("", ""),
    ],
)
def test_a_prompt_shows_where_its_answer_begins(prompt: str, where: str) -> None:
    assert row_of("hermes").reasoning_at(prompt) == where and row_of("gpt-oss").reasoning_at(prompt) == ""


@pytest.mark.parametrize("name", ["think", "gemma-3"])
def test_a_template_without_tools_gets_them_as_text(name: str) -> None:
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "CET"}}}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "call_1"},
    ]
    row = row_of(name)
    made = prompted(chat, [TOOL], row)
    assert [message["role"] for message in made] == ["system", "user", "assistant", "user"]
    assert made[0]["content"].startswith("Be brief.\n\n") and '"name": "clock"' in made[0]["content"]
    assert ("<tool_call>" in made[0]["content"]) is (name == "think")
    [read] = AnswerReader(row, calls=True).feed(made[2]["content"])
    assert (read.name, read.arguments) == ("clock", '{"zone": "CET"}')  # type: ignore[union-attr]
    assert made[3]["content"] == "<tool_response>\n12:00\n</tool_response>"
    assert prompted([chat[1]], [], row) == [chat[1]]


def test_a_template_with_tools_in_the_system_message_gets_them_there() -> None:
    row = next(row for row in ROWS if row.place == "system")
    user = {"role": "user", "content": "x"}
    for chat in ([user], [{"role": "system", "content": "y"}, user]):
        messages, variables = with_tools(chat, [TOOL], row)
        assert messages[0]["tools"] == '[{"name": "clock"}]' and messages[1:] == chat[-1:] and not variables
    assert with_tools(chat, [], row) == (chat, {})
