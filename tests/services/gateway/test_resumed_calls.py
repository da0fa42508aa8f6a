"""Resumable chats with calls of tools, forms, scores, choices and stop strings: the rest comes to the letter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.examples import another_of_its_kind
from tests.services.gateway.cluster import Gate
from tests.services.gateway.conftest import ANSWER, OpenSite
from tests.services.gateway.resume.test_resumption import CHAT, STEP_S, Read, copied, reading, rest, same, some, whole
from tests.services.gateway.test_structured_output import CALLS, TOOLS, roomy  # noqa: F401

TOOLS_OF = {"tools": TOOLS, "max_tokens": 400}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}}


@pytest.mark.parametrize(
    ("more", "answer"),
    [
        pytest.param(TOOLS_OF, CALLS, marks=another_of_its_kind()),
        ({**TOOLS_OF, "parallel_tool_calls": False}, CALLS),
        ({**TOOLS_OF, "n": 2, "temperature": 1, "logprobs": True, "top_logprobs": 1}, CALLS),
        pytest.param(
            {**TOOLS_OF, "tool_choice": "required"}, CALLS.removeprefix("Sure.\n"), marks=another_of_its_kind()
        ),
        (TOOLS_OF, "There is <tool_call> no call in it, <tool_cal"),
        pytest.param(FORM, '{"a": "one two three four"}', marks=another_of_its_kind()),
        ({**FORM, "n": 2, "logprobs": True}, '{"a": "one two three four"}'),
        ({"stop": ["3456", "x" * 20]}, ANSWER),
    ],
)
async def test_calls_forms_and_stops_go_on_wherever_they_break(
    open_site: OpenSite,
    tmp_path: Path,
    roomy: Path,  # noqa: F811
    handler_waits: Gate,
    more: dict[str, Any],
    answer: str,
) -> None:
    """At places all over, of the stream as a killed gateway left it there, and of the whole one."""
    path, body = "/v1/chat/completions", {**CHAT, **more}
    async with open_site(answer, model=roomy, step_s=STEP_S / 4) as first:
        undisturbed = await whole(first, path, body)
        read = Read()
        first.manager.gate = handler_waits  # no event is of several tokens
        async with reading(first, read, path, body) as events:
            for _ in range(7):
                await anext(events)
            copy = copied(tmp_path)
        first.manager.gate = None
        async with open_site(answer, model=roomy, step_s=STEP_S / 4, state=copy) as second:
            await some(second, read, 3, f"/v1/streams/{read.token}")
            await rest(second, read)
        same(read, undisturbed)
        again = Read(token=read.token)
        await rest(first, again)
        same(again, undisturbed)
        assert again.calls == read.calls, "the same ids too"
        for seen in range(1, len(undisturbed.ids), 1 + len(undisturbed.ids) // 4):
            part = Read()
            await some(first, part, seen, path, body)
            await some(first, part, 2, f"/v1/streams/{part.token}")
            await rest(first, part)
            same(part, undisturbed)
