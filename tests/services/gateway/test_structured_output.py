"""Structured output and tools over HTTP, with a scripted cluster behind the gateway."""

from __future__ import annotations

import asyncio
import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from cohort.common import grammar
from cohort.common.grammar import GrammarTokens
from cohort.common.messages import TokenUpdate
from cohort.common.types import Attempt, FinishReason
from cohort.services.gateway.text import bounded_process
from cohort.services.gateway.text.grammar_process import ANSWER, REFUSED, GrammarSpec, _compiled
from cohort.services.gateway.text.tokenizer import Tokenizer
from tests.services.gateway.conftest import OpenSite, Site, eventually
from tests.services.gateway.tiny_model import byte_level, costly, write_model

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
TOOLS = [
    {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}},
    {
        "type": "function",
        "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
    },
]
CALLS = (
    'Sure.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose context holds the description of tools."""
    return write_model(tmp_path_factory.mktemp("models") / "roomy", context=8192)


def grammar_of(site: Site) -> str:
    return site.manager.submitted[-1].sampling.grammar


def accepts(tokenizer: Tokenizer, grammar: str, text: str) -> bool:
    tokens = GrammarTokens(tokenizer.to_json(), [2])
    matcher = tokens.compile(grammar)
    matcher.mask(np.zeros(tokens.words, dtype=np.int32))
    ids = tokens.tokens.tokenize_str(text)
    return matcher._matcher.try_consume_tokens(ids) == len(ids) and matcher.complete


async def test_a_request_carries_its_grammar_to_the_workers(open_site: OpenSite) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    async with open_site('{"a": 1}') as site:
        for path, body in ((CHAT, {"messages": HI}), ("/v1/completions", {"prompt": "x"})):
            format_ = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
            status, answer = await site.post(path, {**body, "response_format": format_})
            assert status == 200, answer
            assert accepts(site.tokenizer, grammar_of(site), '{"a": 12}')
            assert not accepts(site.tokenizer, grammar_of(site), '{"a": "12"}')
        status, _ = await site.post("/v1/completions", {"prompt": "x"})
        assert status == 200 and grammar_of(site) == ""


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_regex": "(?=a)"}, "guided_regex", "look-ahead"),
        ({"guided_json": {"type": "nope"}}, "guided_json", "nope"),
        ({"guided_json": {"not": {"type": "string"}}}, "guided_json", "not"),
        ({"guided_json": {"$ref": "#/x"}}, "guided_json", "/x"),
        ({"guided_grammar": "root ::= nowhere"}, "guided_grammar", "nowhere"),
        ({"guided_grammar": "start: " + "(" * 20_000}, "guided_grammar", "nested"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "at most 65536"),
    ],
)
async def test_what_is_wrong_with_a_grammar_is_said(
    open_site: OpenSite, body: dict[str, Any], param: str, words: str
) -> None:
    async with open_site("x") as site:
        status, answer = await site.post("/v1/completions", {"prompt": "x", **body})
        assert (status, answer["error"]["param"]) == (400, param)
        assert words in answer["error"]["message"] and answer["error"]["message"].startswith(param)
        assert site.nothing_left()


def optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": True for i in range(count)}}


async def test_a_schema_with_hundreds_of_optional_properties_is_compiled(open_site: OpenSite) -> None:
    async with open_site("{}", limits={"grammar_cpu_s": 5.0}) as site:
        for count in (300, 1000):
            status, answer = await site.post("/v1/completions", {"prompt": "x", "guided_json": optional(count)})
            assert status == 200, answer
            assert accepts(site.tokenizer, grammar_of(site), '{"p7": 1, "p299": 2}')


async def test_a_grammar_that_a_worker_would_end_at_its_first_tokens_is_refused(open_site: OpenSite) -> None:
    """Beyond the library's limits at its second token; and one whose masks would take 80 ms each."""
    async with open_site("x", limits={"grammar_cpu_s": 5.0}) as site:
        for body, param, words in (
            ({"guided_json": optional(2600)}, "guided_json", "limit 10000"),
            ({"guided_grammar": costly(200)}, "guided_grammar", "limit 1000"),
            ({"guided_grammar": costly(1000)}, "guided_grammar", "limit for this grammar: 1000"),
        ):
            status, answer = await site.post("/v1/completions", {"prompt": "x", **body})
            assert (status, answer["error"]["param"]) == (400, param)
            assert words in answer["error"]["message"]
        assert not site.manager.submitted


def test_a_grammar_whose_masks_take_too_long_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = GrammarTokens(byte_level().to_str(), [2])
    question = msgspec.json.encode(("json_schema", {}))
    assert _compiled(tokens, question)[0] == ANSWER
    monkeypatch.setattr(grammar, "ACCOUNT_S", 0.0)
    monkeypatch.setattr(tokens, "account_s", 0.0)
    kind, why = _compiled(tokens, question)
    assert kind == REFUSED and b"of processor time for 8 tokens" in why


async def test_grammars_that_passed_are_kept_by_their_bytes(open_site: OpenSite) -> None:
    async with open_site("x", limits={"grammars_passed_bytes": 4000}) as site:
        compiler = site.gateway.generator._grammars
        kept = compiler._passed
        for index in range(40):
            await compiler.compile(GrammarSpec("choice", [f"{index}" * 100], "guided_choice"))
            assert sum(len(question) + len(text) for question, text in kept.items()) == compiler._passed_bytes <= 4000
        assert 4 < len(kept) < 40
        await compiler.compile(GrammarSpec("choice", ["x" * 4000], "guided_choice"))
        assert not kept


async def test_a_grammar_that_a_worker_ends_is_the_clients_error_of_its_field(open_site: OpenSite) -> None:
    plain, schema = {"prompt": "x", "max_tokens": 100}, {"type": "object", "properties": {}}
    fields = [("guided_regex", "x*"), ("response_format", {"type": "json_schema", "json_schema": {"schema": schema}})]
    for stream, (field, value) in itertools.product((False, True), fields):
        body = {**plain, field: value}
        async with open_site("x" * 90, step_s=0.02) as site:
            asking = asyncio.create_task((site.stream if stream else site.post)("/v1/completions", body))
            await eventually(lambda site=site: any(entry.output for entry in site.gateway.streams.ledger.entries()))
            entry = next(iter(site.gateway.streams.ledger.entries()))
            attempt = Attempt(entry.request_id, 0)
            ended = TokenUpdate(attempt, entry.known, finish=FinishReason.FAILED, error="too dear", is_clients=True)
            site.manager.workers[0].send([ended])
            error = (await asking)[-2 if stream else 1]["error"]
            assert (error["code"], error["type"]) == ("400", "invalid_request_error") and "too dear" in error["message"]
            assert error["param"].startswith(field)
            await eventually(site.nothing_left)


async def test_a_grammar_that_takes_too_long_ends_its_process_and_the_next_one_is_compiled(
    open_site: OpenSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Seconds of a processor are judged here, not how soon a busy machine gives them.
    monkeypatch.setattr(bounded_process, "_WAIT_FACTOR", 1000.0)
    wide = {"anyOf": [{"type": "object", "properties": {f"p{i}": {"type": "integer"}}} for i in range(1000)]}
    async with open_site("x", limits={"grammar_cpu_s": 0.001}) as site:
        status, answer = await site.post("/v1/completions", {"prompt": "x", "guided_json": wide})
        assert status == 400 and "0.001 s of processor time" in answer["error"]["message"]
        process = site.gateway.generator._grammars._process
        process._limits = replace(process._limits, cpu_s=5.0)  # plenty on any processor, as the other is too little
        status, _ = await site.post("/v1/completions", {"prompt": "x", "guided_choice": ["x"]})
        assert status == 200


async def test_calls_are_read_from_an_answer(open_site: OpenSite, roomy: Path) -> None:
    async with open_site(CALLS, model=roomy) as site:
        status, answer = await site.post(CHAT, {"messages": HI, "tools": TOOLS, "logprobs": True})
        assert status == 200
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "Sure."
        called = [(call["type"], call["function"]) for call in choice["message"]["tool_calls"]]
        assert called == [
            ("function", {"name": "weather", "arguments": '{"city": "Köln"}'}),
            ("function", {"name": "clock", "arguments": "{}"}),
        ]
        assert grammar_of(site) == ""
        rendered = site.tokenizer.decode(site.manager.submitted[-1].tokens, skip_special=False)
        assert '"name": "weather"' in rendered and '"city"' in rendered


async def test_a_stream_has_the_same_calls_as_deltas(open_site: OpenSite, roomy: Path) -> None:
    async with open_site(CALLS, model=roomy) as site:
        events = await site.stream(CHAT, {"messages": HI, "tools": TOOLS})
        assert events[-1] == "[DONE]"
        content, calls = "", dict[int, dict[str, str]]()
        finishes = []
        for event in events[:-1]:
            for choice in event["choices"]:
                content += choice["delta"].get("content") or ""
                finishes.append(choice["finish_reason"])
                for delta in choice["delta"].get("tool_calls", []):
                    call = calls.setdefault(delta["index"], {"id": delta.get("id", ""), "name": "", "arguments": ""})
                    call["name"] += delta["function"].get("name", "")
                    call["arguments"] += delta["function"]["arguments"]
        assert content == "Sure." and "<tool" not in json.dumps(events)
        assert [(call["name"], call["arguments"]) for call in calls.values()] == [
            ("weather", '{"city": "Köln"}'),
            ("clock", "{}"),
        ]
        assert len({call["id"] for call in calls.values()}) == 2
        assert finishes[-1] == "tool_calls" and not any(finishes[:-1])


async def test_without_parallel_calls_the_answer_ends_after_the_first(open_site: OpenSite, roomy: Path) -> None:
    async with open_site(CALLS, model=roomy, step_s=0.001) as site:
        body = {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False}
        status, answer = await site.post(CHAT, body)
        assert status == 200
        choice = answer["choices"][0]
        assert choice["finish_reason"] == "tool_calls"
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["weather"]


async def test_required_and_named_tools_bind_the_answer(open_site: OpenSite, roomy: Path) -> None:
    named = {"type": "function", "function": {"name": "clock"}}
    async with open_site(CALLS, model=roomy) as site:
        weather = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
        clock = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
        await site.post(CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": "required"})
        bound = grammar_of(site)
        assert accepts(site.tokenizer, bound, weather) and accepts(site.tokenizer, bound, f"{weather}\n{clock}")
        assert not accepts(site.tokenizer, bound, "Sure.")
        await site.post(CHAT, {"messages": HI, "tools": TOOLS, "tool_choice": named})
        bound = grammar_of(site)
        assert accepts(site.tokenizer, bound, clock) and not accepts(site.tokenizer, bound, weather)


async def test_an_answer_that_ends_by_length_inside_a_call_says_so(open_site: OpenSite, roomy: Path) -> None:
    async with open_site(CALLS, model=roomy) as site:
        for length in range(1, 60, 7):
            _, answer = await site.post(CHAT, {"messages": HI, "tools": TOOLS, "max_tokens": length})
            assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_chat_without_tools_is_not_searched_for_calls(open_site: OpenSite, roomy: Path) -> None:
    async with open_site(CALLS, model=roomy) as site:
        for more in ({}, {"tools": TOOLS, "tool_choice": "none"}):
            _, answer = await site.post(CHAT, {"messages": HI, **more})
            assert answer["choices"][0]["message"]["content"] == CALLS
            assert answer["choices"][0]["finish_reason"] == "stop"
