"""Tools of responses: custom ones, whose input is a text, and a choice among some."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import pytest
from openai.types.responses import Response, ResponseCustomToolCall
from pydantic import TypeAdapter

from tests.services.gateway.conftest import OpenSite, Site
from tests.services.gateway.named_events import named_stream
from tests.services.gateway.tiny_model import write_model

PATH = "/v1/responses"
EXEC = {"type": "custom", "name": "exec", "description": "Runs a program."}
CLOCK = {"type": "function", "name": "clock", "parameters": {"type": "object", "properties": {}}}
PROGRAM = 'print("Köln")\n'
CALLED = f"Sure.<tool_call>{json.dumps({'name': 'exec', 'arguments': {'input': PROGRAM}})}</tool_call>"


@pytest.fixture
def roomy_site(open_site: OpenSite, tmp_path_factory: pytest.TempPathFactory) -> OpenSite:
    """Sites of a model whose context has room for tools."""
    return partial(open_site, model=write_model(tmp_path_factory.mktemp("models") / "tiny", context=4096))


def prompt_of(site: Site) -> str:
    return site.tokenizer.decode(site.manager.submitted[-1].tokens, skip_special=False)


async def test_a_custom_tool_is_called_with_a_text(roomy_site: OpenSite) -> None:
    async with roomy_site(CALLED) as site:
        status, answer = await site.post(PATH, {"input": "Run it", "tools": [EXEC, CLOCK]})
        assert status == 200
        message, call = answer["output"]
        assert message["type"] == "message" and call["type"] == "custom_tool_call"
        assert (call["name"], call["input"], call["status"]) == ("exec", PROGRAM, "completed")
        assert call["id"].startswith("ctc_") and call["call_id"].startswith("call_")
        parsed = TypeAdapter(Response).validate_python(answer).output[1]
        assert isinstance(parsed, ResponseCustomToolCall) and parsed.input == PROGRAM
        assert '"required": ["input"]' in prompt_of(site)
        outcome = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "Köln"}
        for body in (
            {"previous_response_id": answer["id"], "input": [outcome]},
            {"input": [{"role": "user", "content": "Run it"}, *answer["output"], outcome]},
        ):
            assert (await site.post(PATH, {**body, "tools": [EXEC]}))[0] == 200
            assert json.dumps({"input": PROGRAM}, ensure_ascii=False) in prompt_of(site)
            assert "<tool_response>\nKöln\n</tool_response>" in prompt_of(site)


async def test_a_stream_has_the_input_when_it_is_whole(roomy_site: OpenSite) -> None:
    async with roomy_site(CALLED, step_s=0.001) as site:
        events = await named_stream(site, PATH, {"input": "Run it", "tools": [EXEC]})
        kinds = [event["type"] for event in events if "custom_tool_call_input" in event["type"]]
        assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
        delta, done = (event for event in events if "custom_tool_call_input" in event["type"])
        assert delta["delta"] == done["input"] == PROGRAM
        added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
        assert added[1]["type"] == "custom_tool_call" and added[1]["input"] == ""
        assert events[-1]["response"]["output"][1]["input"] == PROGRAM
        assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_words_that_are_no_arguments_are_the_input(roomy_site: OpenSite) -> None:
    async with roomy_site('<tool_call>{"name": "exec", "arguments": {"program": "ls"}}</tool_call>') as site:
        _, answer = await site.post(PATH, {"input": "Run it", "tools": [EXEC]})
        assert answer["output"][0]["input"] == '{"program": "ls"}'


async def test_a_grammar_is_shown_and_a_regex_binds(roomy_site: OpenSite) -> None:
    form: dict[str, Any] = {"type": "grammar", "syntax": "regex", "definition": "[0-9]{3}"}
    async with roomy_site(CALLED) as site:
        forced = {"input": "x", "tools": [{**EXEC, "format": form}], "tool_choice": {"type": "custom", "name": "exec"}}
        assert (await site.post(PATH, forced))[0] == 200
        assert "^(?:[0-9]{3})$" in site.manager.submitted[-1].sampling.grammar.replace("\\\\", "\\")
        assert "This" not in prompt_of(site) and "keeps to this regex grammar:" in prompt_of(site)
        lark = {**EXEC, "format": {**form, "syntax": "lark", "definition": 'start: "a"'}}
        assert (await site.post(PATH, {"input": "x", "tools": [lark]}))[0] == 200
        assert "keeps to this lark grammar:" in prompt_of(site)
        status, answer = await site.post(PATH, {"input": "x", "tools": [lark], "tool_choice": "required"})
        assert (status, answer["error"]["param"]) == (400, "tools[0].format.syntax")
        half = {**EXEC, "format": {"type": "grammar", "syntax": "lark"}}
        status, answer = await site.post(PATH, {"input": "x", "tools": [half]})
        assert (status, answer["error"]["param"]) == (400, "tools[0].format.definition")


@pytest.mark.parametrize(("mode", "bound"), [("auto", False), ("required", True)])
async def test_only_allowed_tools_are_shown_and_called(roomy_site: OpenSite, mode: str, bound: bool) -> None:
    async with roomy_site(CALLED) as site:
        allowed = {"type": "allowed_tools", "mode": mode, "tools": [{"type": "function", "name": "clock"}]}
        body = {"input": "x", "tools": [EXEC, CLOCK], "tool_choice": allowed}
        status, answer = await site.post(PATH, body)
        assert (status, answer["tool_choice"]) == (200, allowed)
        assert '"clock"' in prompt_of(site) and '"exec"' not in prompt_of(site)
        grammar = site.manager.submitted[-1].sampling.grammar
        assert ("clock" in grammar, "exec" in grammar) == (bound, False)
        chat = {
            "messages": [{"role": "user", "content": "x"}],
            "tools": [{"type": "function", "function": {"name": name}} for name in ("exec", "clock")],
            "tool_choice": {
                "type": "allowed_tools",
                "allowed_tools": {"mode": mode, "tools": [{"type": "function", "function": {"name": "clock"}}]},
            },
        }
        assert (await site.post("/v1/chat/completions", chat))[0] == 200
        assert '"clock"' in prompt_of(site) and '"exec"' not in prompt_of(site)


async def test_what_is_no_tool_cannot_be_allowed(roomy_site: OpenSite) -> None:
    async with roomy_site() as site:
        for allowed in ([{"type": "function", "name": "other"}], []):
            choice = {"type": "allowed_tools", "mode": "auto", "tools": allowed}
            status, answer = await site.post(PATH, {"input": "x", "tools": [CLOCK], "tool_choice": choice})
            assert status == 400 and answer["error"]["param"].startswith("tool_choice")
