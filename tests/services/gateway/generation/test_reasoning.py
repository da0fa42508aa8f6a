"""Reasoning apart from the answer, over HTTP, in all three APIs and back, with a scripted cluster behind them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from tests.services.gateway.cluster import Gate
from tests.services.gateway.conftest import OpenSite, Site, eventually
from tests.services.gateway.named_events import named_stream
from tests.services.gateway.resume.test_resumption import CHAT as BODY
from tests.services.gateway.resume.test_resumption import STEP_S, Read, copied, reading, rest, same, some, whole
from tests.services.gateway.test_structured_output import CALLS, TOOLS
from tests.services.gateway.tiny_model import byte_level, write_model

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
HI = [{"role": "user", "content": "Hi"}]
THOUGHT = "The quick brown fox?"
ANSWER = f"<think>\n{THOUGHT}\n</think>\n\nIn Köln."
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}
TEMPLATE = (
    "{%- if tools %}{{- '<|start|>tools\\n' + (tools | tojson) + '<|end|>\\n' }}{% endif %}"
    "{%- for message in messages %}{{- '<|start|>' + message.role + '\\n' }}"
    "{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{% endif %}"
    "{{- message.content + '<|end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}"
    "{%- if enable_thinking is defined %}{{- '<think>' if enable_thinking else '<think></think>' }}{% endif %}"
    "{%- endif %}{#- <tool_call> #}"
)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with the marks of reasoning as tokens, whose template begins or ends reasoning when told to."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<think>", special=False), AddedToken("</think>", special=False)])
    return write_model(tmp_path_factory.mktemp("models") / "thinking", tokenizer, template=TEMPLATE, context=8192)


def prompt(site: Site) -> str:
    return site.tokenizer.decode(site.manager.submitted[-1].tokens, skip_special=False)


def tokens_of(site: Site, text: str) -> int:
    return len(site.tokenizer.encode(text, special_tokens=False))


async def test_a_chat_has_reasoning_apart_and_counts_its_tokens(open_site: OpenSite, thinking: Path) -> None:
    async with open_site(ANSWER, model=thinking) as site:
        status, answer = await site.post(CHAT, {"messages": HI, "logprobs": True})
        assert status == 200, answer
        message, usage = answer["choices"][0]["message"], answer["usage"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, "In Köln.")
        counted = usage["completion_tokens_details"]["reasoning_tokens"]
        assert counted == tokens_of(site, ANSWER.partition("</think>")[0]) + 1 < usage["completion_tokens"]
        events = await site.stream(CHAT, {"messages": HI, "stream_options": {"include_usage": True}})
        deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
        assert "".join(delta.get("content", "") for delta in deltas) == "In Köln." and "think>" not in json.dumps(
            events
        )
        assert deltas[0]["role"] == "assistant" and deltas[0]["reasoning_content"] and "content" not in deltas[0]
        assert events[-2]["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]


async def test_what_the_template_begins_or_ends_is_known(open_site: OpenSite, thinking: Path) -> None:
    async with open_site(f"{THOUGHT}</think>In Köln.", model=thinking) as site:
        for body in ({"reasoning_effort": "high"}, {"chat_template_kwargs": {"enable_thinking": True}}):
            _, answer = await site.post(CHAT, {"messages": HI, **body})
            message = answer["choices"][0]["message"]
            assert prompt(site).endswith("<think>")
            assert (message["reasoning_content"], message["content"]) == (THOUGHT, "In Köln.")
        _, answer = await site.post(CHAT, {"messages": HI, "reasoning_effort": "none"})
        assert prompt(site).endswith("<think></think>")
        assert answer["choices"][0]["message"]["content"] == f"{THOUGHT}</think>In Köln."
        assert "completion_tokens_details" not in answer["usage"]


async def test_reasoning_and_calls_come_in_one_answer(open_site: OpenSite, thinking: Path) -> None:
    async with open_site(f"<think>{THOUGHT}</think>\n{CALLS}", model=thinking) as site:
        _, answer = await site.post(CHAT, {"messages": HI, "tools": TOOLS})
        message = answer["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == (THOUGHT, "Sure.")
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "clock"]
        _, answer = await site.post(CHAT, {"messages": HI, "tools": TOOLS, "parallel_tool_calls": False})
        assert [call["function"]["name"] for call in answer["choices"][0]["message"]["tool_calls"]] == ["weather"]


async def test_responses_have_reasoning_items_and_take_them_back(open_site: OpenSite, thinking: Path) -> None:
    async with open_site(ANSWER, model=thinking) as site:
        _, answer = await site.post(RESPONSES, {"model": "thinking", "input": "Hi", "reasoning": {"effort": "high"}})
        assert answer["reasoning"]["effort"] == "high"
        _, answer = await site.post(RESPONSES, {"model": "thinking", "input": "Hi"})
        reasoning, message = answer["output"]
        assert reasoning["type"] == "reasoning" and reasoning["summary"] == []
        assert reasoning["content"] == [{"type": "reasoning_text", "text": THOUGHT}]
        assert message["content"][0]["text"] == "In Köln."
        assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] > 3
        again = [{"role": "user", "content": "Hi"}, reasoning, message, {"role": "user", "content": "So?"}]
        for more in ({"input": again}, {"input": "So?", "previous_response_id": answer["id"]}):
            status, _ = await site.post(RESPONSES, {"model": "thinking", **more})
            assert status == 200 and f"assistant\n<think>{THOUGHT}</think>In Köln.<|end|>" in prompt(site)
        summed = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "x"}
        await site.post(RESPONSES, {"model": "thinking", "input": [again[0], summed, *again[2:]]})
        assert "<think>Hm.</think>In Köln." in prompt(site)


async def test_a_response_streams_its_reasoning_first(open_site: OpenSite, thinking: Path) -> None:
    async with open_site(ANSWER, model=thinking, step_s=0.001) as site:
        events = await named_stream(site, RESPONSES, {"model": "thinking", "input": "Hi"})
        kinds = list(dict.fromkeys(event["type"] for event in events))
        assert kinds[2:7] == [
            "response.output_item.added",
            "response.content_part.added",
            "response.reasoning_text.delta",
            "response.reasoning_text.done",
            "response.content_part.done",
        ]
        assert "".join(e["delta"] for e in events if e["type"] == "response.reasoning_text.delta") == THOUGHT
        assert [e["item"]["type"] for e in events if e["type"] == "response.output_item.done"] == [
            "reasoning",
            "message",
        ]


async def test_messages_have_thinking_blocks_and_take_them_back(open_site: OpenSite, thinking: Path) -> None:
    ask = {"model": "thinking", "max_tokens": 100, "messages": HI}
    async with open_site(ANSWER, model=thinking) as site:
        _, answer = await site.post(MESSAGES, {**ask, "output_config": {"effort": "high"}})
        assert prompt(site).endswith("<think>")
        await site.post(MESSAGES, {**ask, "thinking": {"type": "disabled"}, "output_config": {"effort": "high"}})
        assert prompt(site).endswith("<think></think>")
        _, answer = await site.post(MESSAGES, ask)
        thought, text = answer["content"]
        assert (thought["type"], thought["thinking"], text["text"]) == ("thinking", THOUGHT, "In Köln.")
        assert thought["signature"] and answer["stop_reason"] == "end_turn"
        again = [*HI, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "So?"}]
        status, _ = await site.post(MESSAGES, {**ask, "messages": again, "thinking": {"type": "adaptive"}})
        assert status == 200 and f"<think>{THOUGHT}</think>In Köln.<|end|>" in prompt(site)
        events = await named_stream(site, MESSAGES, {**ask})
        deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        assert list(dict.fromkeys(d["type"] for d in deltas)) == ["thinking_delta", "signature_delta", "text_delta"]
        assert "".join(d.get("thinking", "") for d in deltas) == THOUGHT


async def test_a_form_binds_what_follows_reasoning(open_site: OpenSite, thinking: Path) -> None:
    async with open_site("{}", model=thinking) as site:
        begin, end = (site.tokenizer.added_token(mark) for mark in ("<think>", "</think>"))
        for effort, opens, closes in ((None, (begin,), end), ("high", (), end), ("none", (), -1)):
            status, answer = await site.post(
                CHAT, {"messages": HI, "response_format": FORM, "reasoning_effort": effort, "tools": TOOLS}
            )
            assert status == 200, answer
            sampling = site.manager.submitted[-1].sampling
            assert sampling.grammar and (sampling.grammar_opens, sampling.grammar_closes) == (opens, closes)
        await site.post("/v1/completions", {"prompt": "Hi", "response_format": FORM})
        assert site.manager.submitted[-1].sampling.grammar_closes == -1


@pytest.mark.parametrize("more", [{}, {"tools": TOOLS, "max_tokens": 400}])
async def test_a_stream_goes_on_within_reasoning(
    open_site: OpenSite, tmp_path: Path, thinking: Path, handler_waits: Gate, more: dict[str, Any]
) -> None:
    """Wherever it breaks: of the stream as a killed gateway left it, and of the whole one."""
    body = {**BODY, "model": "thinking", **more}
    answer = f"<think>{THOUGHT}</think>\n{CALLS}"
    async with open_site(answer, model=thinking, step_s=STEP_S / 4) as first:
        undisturbed = await whole(first, CHAT, body)
        assert undisturbed.reasoning[0] == THOUGHT
        read = Read()
        first.manager.gate = handler_waits
        async with reading(first, read, CHAT, body) as events:
            for _ in range(5):
                await anext(events)
            copy = copied(tmp_path)
        first.manager.gate = None
        assert "Sure" not in "".join(read.texts.values()) and read.reasoning
        async with open_site(answer, model=thinking, step_s=STEP_S / 4, state=copy) as second:
            await rest(second, read)
        same(read, undisturbed)
        for seen in range(1, len(undisturbed.ids), 1 + len(undisturbed.ids) // 6):
            part = Read()
            await some(first, part, seen, CHAT, body)
            await rest(first, part)
            same(part, undisturbed)


async def test_a_stream_goes_on_when_its_worker_dies_within_reasoning(open_site: OpenSite, thinking: Path) -> None:
    body = {"messages": HI, "tools": TOOLS, "max_tokens": 400}
    async with open_site(f"<think>{THOUGHT}</think>\n{CALLS}", model=thinking, step_s=0.01) as site:
        site.manager.add_worker("worker-1")
        await site.post(CHAT, {"messages": HI, "max_tokens": 1})  # what begins with the first chat has begun
        rest, gates = asyncio.Event(), iter([asyncio.sleep(0) for _ in range(6)])
        site.manager.gate = lambda: next(gates, None) or rest.wait()
        stream = asyncio.create_task(site.stream(CHAT, body))
        await eventually(lambda: any(len(entry.output) > 3 for entry in site.gateway.streams.ledger.entries()))
        busy = next(worker for worker in site.manager.workers if worker.running)
        site.manager.lose(busy.kill(), "it is dead")
        rest.set()
        events = await stream
        assert events[-2]["cohort"]["requests"][0]["attempts"] == 2
        deltas = [choice["delta"] for event in events[:-1] for choice in event["choices"]]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == THOUGHT
        assert "".join(delta.get("content", "") for delta in deltas) == "Sure."
        calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
        assert [call["function"]["name"] for call in calls if "id" in call] == ["weather", "clock"]
