from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cohort.common.config import GatewayConfig
from cohort.common.errors import RequestError
from cohort.common.types import Slo
from cohort.services.gateway.http.bodies import ChatBody, CompletionBody
from cohort.services.gateway.http.error_shapes import error_body
from cohort.services.gateway.http.sse import _encode
from cohort.services.gateway.requests.formats import AnswerFormat, answer_format
from cohort.services.gateway.requests.model_card import ModelCard, SamplingDefaults
from cohort.services.gateway.requests.parsing import Call, parse_chat, parse_completion
from tests.examples import examples

CONFIG = GatewayConfig(max_waiting_requests=4, unknown_fields="refuse")
CARD = ModelCard("tiny", Path("/models/tiny"), 100, 50, (2,))
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
HI = [{"role": "user", "content": "Hi"}]
HERMES = answer_format("{{ tools }}<tool_call>", {}.get)
HARMONY = answer_format("{{ tools }}<|channel|><|message|>", {}.get)


def completion(headers: dict[str, str] | None = None, **body: Any) -> Call:
    return parse_completion(json.dumps({"prompt": "Hi", **body}).encode(), headers or {}, CONFIG, CARD)


def chat(headers: dict[str, str] | None = None, **body: Any) -> Call:
    return parse_chat(json.dumps({"messages": HI, **body}).encode(), headers or {}, CONFIG, CARD)


def refusal(parse: Any, **body: Any) -> tuple[int, str | None]:
    with pytest.raises(RequestError) as caught:
        parse(**body)
    assert caught.value.message
    return caught.value.status, caught.value.param


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ([1, 2],)), ([[1], [2, 3]], ([1], [2, 3])), ("", ("",))],
)
def test_the_four_shapes_of_a_prompt(prompt: Any, expected: Any) -> None:
    assert completion(prompt=prompt).prompts == expected


@pytest.mark.parametrize(
    "prompt",
    [[], [[]], ["a", 1], [1, [2]], [50], [-1], [[1], [50]], [True], 5, None, {}, [10**30], [1.5], [["a"]], ["x"] * 9],
)
def test_other_prompts_are_refused_by_name(prompt: Any) -> None:
    status, param = refusal(completion, prompt=prompt)
    assert status == 400 and (param or "").startswith("prompt")


def test_defaults_are_openais() -> None:
    call = completion()
    assert (call.max_tokens, call.n, call.sampling.temperature, call.sampling.logprobs) == (16, 1, 1.0, -1)
    assert (call.stream, call.echo, call.seed, call.stop_strings) == (False, False, None, ())
    assert chat().max_tokens is None


def test_every_sampling_field_arrives() -> None:
    call = completion(
        max_tokens=9,
        min_tokens=3,
        temperature=0.5,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        seed=-7,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={"3": -100, "4": 5.5},
        stop=["x", "yy", "x"],
        stop_token_ids=[7],
        ignore_eos=True,
        n=2,
        logprobs=5,
        priority=-3,
        skip_special_tokens=False,
        echo=False,
        add_special_tokens=False,
        user="me",
        best_of=2,
    )
    sampling = call.sampling
    assert (call.max_tokens, sampling.min_tokens, sampling.temperature, sampling.top_p) == (9, 3, 0.5, 0.9)
    assert (sampling.top_k, sampling.min_p, call.seed, sampling.repetition_penalty) == (40, 0.05, -7, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, -0.3)
    assert (sampling.logit_bias, call.stop_strings, call.stop_token_ids) == ({3: -100.0, 4: 5.5}, ("x", "yy"), (7,))
    assert (call.ignore_eos, call.n, sampling.logprobs, call.priority) == (True, 2, 5, -3)
    assert (call.skip_special_tokens, call.add_special_tokens) == (False, False)


@pytest.mark.parametrize(
    ("asked", "logprobs"),
    [
        ({}, -1),
        ({"logprobs": None, "top_logprobs": None}, -1),
        ({"logprobs": False}, -1),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_chat_logprobs(asked: dict[str, Any], logprobs: int) -> None:
    assert chat(**asked).sampling.logprobs == logprobs


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize(
    "body",
    [
        {
            "temperature": None,
            "top_p": None,
            "n": None,
            "stop": None,
            "seed": None,
            "logit_bias": None,
            "user": None,
            "stream": None,
            "stream_options": None,
            "max_tokens": None,
            "logprobs": None,
            "presence_penalty": None,
        },
        {"max_tokens": 5, "max_completion_tokens": 5},
        {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
        {
            "metadata": {"a": 1},
            "store": False,
            "service_tier": "auto",
            "prompt_cache_key": "k",
            "safety_identifier": "s",
        },
        {"top_k": -1},
        {"stop": []},
        {"use_beam_search": False},
        {"model": "tiny"},
        {"model": "/models/tiny"},
    ],
)
def test_bodies_of_common_clients_are_accepted(parse: Any, body: dict[str, Any]) -> None:
    parse(**body)


def test_fields_that_ask_for_nothing_are_accepted() -> None:
    chat(
        tools=[],
        tool_choice="none",
        response_format={"type": "text"},
        parallel_tool_calls=True,
        functions=None,
        modalities=["text"],
        audio=None,
    )
    completion(suffix="", best_of=1)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": 2.1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -0.1}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**40}, "max_tokens"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_completion_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"50": 1}}, "logit_bias"),
        ({"logit_bias": {"": 1}}, "logit_bias"),
        ({"logit_bias": {"1" * 500: 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias[...]"),
        ({"stop": ""}, "stop"),
        ({"stop": [""]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop_token_ids": [50]}, "stop_token_ids"),
        ({"best_of": 5}, "best_of"),
        ({"n": 3, "best_of": 2}, "best_of"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"surprise": 1}, "surprise"),
        ({"cohort": {"class": "urgent"}}, "cohort.class"),
        ({"cohort": {"speed": 1}}, "cohort.speed"),
        ({"cohort": {"ttft_slo_ms": -5}}, "cohort.ttft_slo_ms"),
        ({"cohort": {"if_late": "wait"}}, "cohort.if_late"),
        ({"priority": 2**40}, "priority"),
        ({"response_format": {"type": "yaml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"surprise": 1}}, "structured_outputs.surprise"),
    ],
)
@pytest.mark.parametrize("parse", [completion, chat])
def test_a_field_that_cannot_be_honoured_is_refused_by_name(parse: Any, body: dict[str, Any], param: str) -> None:
    assert refusal(parse, **body) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"messages": HI}, "messages"),
        ({"tools": []}, "tools"),
    ],
)
def test_completions_refuse(body: dict[str, Any], param: str) -> None:
    assert refusal(completion, **body) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"best_of": 2}, "best_of"),
        ({"tools": [{"type": "function"}]}, "tools[...].function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL] * 200}, "tools"),
        ({"tools": [TOOL]}, "tools"),  # this parser was given no form of calls
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {}}, "response_format.type"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": "Hi"}, "messages"),
        ({"messages": [3]}, "messages[...]"),
        ({"prompt": "x"}, "prompt"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [1]}]}, "messages[0].tool_calls"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"echo": True}, "echo"),
    ],
)
def test_chat_refuses(body: dict[str, Any], param: str) -> None:
    status, named = refusal(chat, **body)
    # Which element of a list is wrong, the decoder does not always say.
    assert (status, (named or "").split("[")[0]) == (400, param.split("[")[0])


def test_an_unknown_model_is_404() -> None:
    assert refusal(completion, model="gpt-9") == (404, "model")


def test_content_parts_are_joined_and_history_comes_back() -> None:
    call = chat(
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "Ada"},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "audio": None},
        ]
    )
    assert [message["content"] for message in call.messages] == ["a\nb", ""]
    assert call.messages[0]["name"] == "Ada"


def test_class_and_slo_by_body_by_header_and_by_default() -> None:
    assert completion().slo == Slo()  # the defaults of its class are filled in on admission
    batch = completion(cohort={"class": "be", "deadline_ms": 5000, "online": False})
    assert (batch.traffic_class, batch.slo, batch.online) == ("be", Slo(deadline_s=5.0), False)
    headers = {"x-cohort-class": "RT", "x-cohort-ttft-slo-ms": "250", "x-cohort-tpot-slo-ms": "40.5"}
    urgent = completion(headers, cohort={"class": "be", "ttft_slo_ms": 9000})
    assert (urgent.traffic_class, urgent.slo) == ("rt", Slo(0.25, 0.0405))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-cohort-class", "vip"),
        ("x-cohort-ttft-slo-ms", "soon"),
        ("x-cohort-ttft-slo-ms", "nan"),
        ("x-cohort-tpot-slo-ms", "-1"),
        ("x-cohort-tpot-slo-ms", "inf"),
        ("x-cohort-if-late", "wait"),
    ],
)
def test_bad_headers_are_named(name: str, value: str) -> None:
    assert refusal(completion, headers={name: value}) == (400, name)


def test_a_tiny_temperature_is_greedy() -> None:
    assert completion(temperature=1e-9).sampling.temperature == 0.0


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt":"\xed\xa0\x80"}',
        b'{"prompt":"x","temperature":NaN}',
        b'{"prompt":"x","temperature":1e999}',
        b'{"prompt":"x","max_tokens":' + b"9" * 5000 + b"}",
        b'{"prompt":"x"}{"prompt":"y"}',
        b'{"prompt":"\\ud800"}',
        b'{"metadata":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"metadata":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_001,
        b'{"prompt":"x","temperature":Infinity}',
        b"\x00",
    ],
)
@pytest.mark.parametrize("parse", [parse_completion, parse_chat])
def test_malformed_bytes_are_the_clients_error(parse: Any, data: bytes) -> None:
    with pytest.raises(RequestError) as caught:
        parse(data, {}, CONFIG, CARD)
    assert caught.value.status == 400
    _encode(error_body(caught.value))


FIELDS = sorted({*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__})
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["rt", "be", "text", "user", "tiny", "auto", "\udc80"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "class", "5", ""]) | st.text(max_size=4), inner
        )
    ),
    max_leaves=12,
)


@settings(max_examples=examples(2))
@given(
    body=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=5),
    valid=st.booleans(),
    is_chat=st.booleans(),
    headers=st.dictionaries(st.sampled_from(["x-cohort-class", "x-cohort-ttft-slo-ms"]), st.text(max_size=8)),
)
@example(body={"model": "\udc80"}, valid=True, is_chat=False, headers={})
@example(body={"\udc80": 1}, valid=True, is_chat=True, headers={})
def test_whatever_a_body_says_it_is_a_call_or_a_clear_refusal(
    body: dict[str, Any], valid: bool, is_chat: bool, headers: dict[str, str]
) -> None:
    base: dict[str, Any] = {"messages": HI} if is_chat else {"prompt": "Hi"}
    data = json.dumps({**base, **body} if valid else body).encode()
    try:
        call = (parse_chat if is_chat else parse_completion)(data, headers, CONFIG, CARD)
    except RequestError as error:
        assert error.status in (400, 404)
        _encode(error_body(error))  # and the refusal can be sent
    else:
        assert call.n >= 1


@settings(max_examples=examples(3))
@given(st.binary(max_size=80))
def test_any_bytes_are_a_call_or_a_clear_refusal(data: bytes) -> None:
    for parse in (parse_completion, parse_chat):
        with pytest.raises(RequestError):
            parse(data, {}, CONFIG, CARD)


def test_what_a_request_names_wins_over_the_models_defaults() -> None:
    defaults = SamplingDefaults(0.2, 0.9, 20, 0.1, 1.1)
    card = replace(CARD, sampling=defaults)
    silent = parse_completion(b'{"prompt": "x"}', {}, GatewayConfig(), card).sampling
    assert (silent.temperature, silent.top_p, silent.top_k, silent.min_p, silent.repetition_penalty) == (
        0.2,
        0.9,
        20,
        0.1,
        1.1,
    )
    body = b'{"prompt": "x", "temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1}'
    named = parse_completion(body, {}, GatewayConfig(), card).sampling
    assert (named.temperature, named.top_p, named.top_k, named.min_p, named.repetition_penalty) == (0, 1, 0, 0, 1)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize("parse", [completion, chat])
@pytest.mark.parametrize(
    ("body", "kind", "content"),
    [
        ({"response_format": {"type": "json_object"}}, "json_schema", {"type": "object"}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": SCHEMA, "strict": True},
                }
            },
            "json_schema",
            SCHEMA,
        ),
        ({"guided_json": SCHEMA}, "json_schema", SCHEMA),
        ({"guided_json": json.dumps(SCHEMA)}, "json_schema", SCHEMA),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a", "b"]}, "choice", ["a", "b"]),
        ({"guided_grammar": "root ::= 'a'", "guided_decoding_backend": "auto"}, "grammar", "root ::= 'a'"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", SCHEMA),
        ({"structured_outputs": {"json_object": True}}, "json_schema", {"type": "object"}),
        ({"structured_outputs": {"choice": ["x"]}}, "choice", ["x"]),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            "json_schema",
            {"x-guidance": {"whitespace_flexible": False}, **SCHEMA},
        ),
    ],
)
def test_what_binds_an_answer_has_many_names(parse: Any, body: dict[str, Any], kind: str, content: Any) -> None:
    wanted = parse(**body).grammar_spec
    assert (wanted.kind, wanted.content) == (kind, content)


def tools_chat(format_: AnswerFormat | None = HERMES, **body: Any) -> Call:
    data = json.dumps({"messages": HI, "tools": [TOOL], **body}).encode()
    return parse_chat(data, {}, CONFIG, CARD, format_)


def test_tools_reach_the_template_and_bind_only_what_must_call() -> None:
    auto = tools_chat()
    assert auto.tools is not None and auto.grammar_spec is None and auto.template_variables["tools"] == [TOOL]
    assert tools_chat(tool_choice="none").tools is None
    assert "tools" not in tools_chat(tool_choice="none").template_variables
    for choice in ("required", {"type": "function", "function": {"name": "f"}}):
        bound = tools_chat(tool_choice=choice)
        assert (
            bound.grammar_spec is not None and bound.grammar_spec.kind == "lark" and bound.grammar_spec.param == "tools"
        )
    for choice in ("sometimes", {"type": "function", "function": {"name": "g"}}):
        assert refusal(tools_chat, tool_choice=choice) == (400, "tool_choice")
    assert refusal(tools_chat, guided_grammar="start: /x/") == (400, "guided_grammar")
    bound = tools_chat(response_format={"type": "json_object"}, tool_choice="required").grammar_spec
    assert bound is not None and bound.param == "tools"  # there will be no text for the format to bind
    assert refusal(tools_chat, tool_choice="required", ignore_eos=True) == (400, "ignore_eos")


def test_a_form_beside_tools_binds_the_answer_that_calls_none() -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 7}}}
    both = tools_chat(response_format=form).grammar_spec
    assert both is not None and (both.kind, both.param) == ("lark", "response_format.json_schema.schema")
    assert both.content.startswith("start: calls | answer\n") and '"const": 7' in both.content
    must = tools_chat(response_format=form, tool_choice="required").grammar_spec
    assert must is not None and must.param == "tools" and "answer" not in must.content
    alone = tools_chat(response_format=form, tool_choice="none").grammar_spec
    assert alone is not None and alone.kind == "json_schema"
    in_channel = tools_chat(HARMONY, response_format=form, tool_choice="none").grammar_spec
    assert in_channel is not None and '"<|channel|>final<|message|>" answer' in in_channel.content


def test_reasoning_is_switched_by_what_templates_know() -> None:
    assert not tools_chat().template_variables.keys() & {"enable_thinking", "thinking", "reasoning_effort"}
    off = tools_chat(reasoning_effort="none").template_variables
    assert (off["enable_thinking"], off["thinking"], off["reasoning_effort"]) == (False, False, "none")
    high = tools_chat(reasoning_effort="high", chat_template_kwargs={"thinking": "mine"}).template_variables
    assert (high["enable_thinking"], high["thinking"], high["reasoning_effort"]) == (True, "mine", "high")
    assert tools_chat(HARMONY, reasoning_effort="minimal").template_variables["reasoning_effort"] == "low"


def test_earlier_reasoning_reaches_the_template_under_its_own_key() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = [*HI, {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": [call]}]
    assert tools_chat(messages=said).messages[1]["reasoning_content"] == "Hm."
    of_harmony = tools_chat(HARMONY, messages=said).messages[1]
    assert (of_harmony["thinking"], of_harmony["content"]) == ("Hm.\nI look.", "")
    assert "reasoning_content" not in of_harmony
    deepseek = answer_format("{{ tools }}<｜tool▁calls▁begin｜>", {}.get)
    function = tools_chat(deepseek, messages=said).messages[1]["tool_calls"][0]["function"]
    assert function == {"name": "f", "arguments": '{"x": 1}'}
    wrong = [*HI, {"role": "assistant", "content": "", "reasoning_content": 1}]
    assert refusal(tools_chat, messages=wrong) == (400, "messages[1].reasoning_content")


def test_messages_of_calls_and_results_are_read() -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    said = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    said.append({"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "3"}]})
    messages = tools_chat(messages=said).messages
    assert messages[1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": 1}}
    assert (messages[1]["content"], messages[2]["content"]) == ("", "3")
    broken = {**call, "function": {"name": "f", "arguments": "{oops"}}
    kept = tools_chat(messages=[*HI, {"role": "assistant", "tool_calls": [broken]}]).messages
    assert kept[1]["tool_calls"][0]["function"]["arguments"] == "{oops"
    for bad in ("x", [1], [{"function": {}}], [{"function": {"name": "f", "arguments": 1}}], [{**call, "id": 1}]):
        status, param = refusal(tools_chat, messages=[*HI, {"role": "assistant", "tool_calls": bad}])
        assert status == 400 and (param or "").startswith("messages[1].tool_calls")
