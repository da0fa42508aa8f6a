"""Fields that nobody knows, and those that change nothing here: ignored, named in a header, logged once."""

from __future__ import annotations

import json
from typing import Any

import pytest
import structlog

from cohort.services.gateway.http import ignored_fields
from cohort.services.gateway.http.bodies import ChatBody
from cohort.services.gateway.http.ignored_fields import (
    IGNORED_HEADER,
    MOST_LOGGED,
    MOST_NAMES,
    IgnoredFields,
    note,
    without_unknown,
)
from tests.services.gateway.conftest import ANSWER, OpenSite, Site

HI = [{"role": "user", "content": "Hi"}]
CHAT, COMPLETION, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGE, COUNT = "/v1/messages", "/v1/messages/count_tokens"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    COMPLETION: {"prompt": "Hi"},
    RESPONSE: {"input": "Hi"},
    MESSAGE: {"model": "tiny", "messages": HI, "max_tokens": 60},
    COUNT: {"model": "tiny", "messages": HI},
    "/tokenize": {"prompt": "Hi"},
}


async def sent(site: Site, path: str, body: dict[str, Any]) -> tuple[int, str | None, bytes]:
    async with site.session.post(site.url + path, json=body) as response:
        return response.status, response.headers.get(IGNORED_HEADER), await response.read()


@pytest.mark.parametrize("path", BODIES)
async def test_an_unknown_field_is_ignored_and_named(open_site: OpenSite, path: str) -> None:
    async with open_site() as site:
        body = {**BODIES[path], "chat_id": "x", "options": {"num_ctx": [1, {"a": None}]}}
        assert (await sent(site, path, body))[:2] == (200, "chat_id, options")
        assert (await sent(site, path, BODIES[path]))[:2] == (200, None)


@pytest.mark.parametrize("path", BODIES)
async def test_an_option_refuses_it(open_site: OpenSite, path: str) -> None:
    async with open_site(unknown_fields="refuse") as site:
        status, header, data = await sent(site, path, {**BODIES[path], "chat_id": "x"})
        assert (status, header) == (400, None) and b"chat_id: Object contains unknown field" in data
        if path not in (MESSAGE, COUNT):
            assert json.loads(data)["error"]["param"] == "chat_id"
            assert json.loads(data)["error"]["code"] == "unknown_parameter"


async def test_a_near_miss_is_named_with_what_was_meant(open_site: OpenSite) -> None:
    """It is ignored all the same: another server's `repeat_penalty` looks like a slip for ours."""
    body = {"messages": HI, "max_tokenz": 3, "temprature": 0, "top_a": 0.1}
    async with open_site() as site:
        status, header, data = await sent(site, CHAT, body)
        assert (status, header) == (200, "max_tokenz;meant=max_tokens, temprature;meant=temperature, top_a")
        assert json.loads(data)["choices"][0]["message"]["content"] == ANSWER  # not of three tokens
    async with open_site(unknown_fields="refuse") as site:
        status, _, data = await sent(site, CHAT, body)
        assert status == 400 and json.loads(data)["error"]["message"].endswith("did you mean max_tokens?")


async def test_a_stream_names_them_in_its_head(open_site: OpenSite) -> None:
    async with open_site() as site:
        body = {"messages": HI, "stream": True, "chat_id": "x"}
        async with site.session.post(site.url + CHAT, json=body, headers={"x-cohort-resume": "keep"}) as response:
            assert (response.status, response.headers[IGNORED_HEADER]) == (200, "chat_id")
            assert (await response.read()).endswith(b"data: [DONE]\n\n")


async def test_fields_within_known_ones_are_named_with_their_place(open_site: OpenSite) -> None:
    tool = {"type": "function", "mood": 1, "function": {"name": "f", "parameters": {"type": "object", "x": 1}, "y": 2}}
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi", "extra": 1}]}]
    async with open_site() as site:
        answered = await sent(site, CHAT, {"messages": HI, "tools": [tool, {**tool, "function": {"name": "g"}}]})
        assert answered[:2] == (200, "tools.mood, tools.function.y")
        assert (await sent(site, RESPONSE, {"input": items}))[:2] == (200, "input.content.extra")


async def test_a_mistake_in_our_own_options_is_refused(open_site: OpenSite) -> None:
    async with open_site() as site:
        status, _, data = await sent(site, CHAT, {"messages": HI, "chat_id": 1, "cohort": {"ttft_slo": 3}})
        assert (status, json.loads(data)["error"]["param"]) == (400, "cohort.ttft_slo")


@pytest.mark.parametrize(
    ("path", "change", "named"),
    [
        (CHAT, {"reasoning_effort": "high", "verbosity": "low"}, "verbosity, reasoning_effort"),
        (CHAT, {"reasoning_effort": "none", "reasoning": None}, "reasoning"),
        (RESPONSE, {"reasoning": {"effort": "high", "summary": "auto"}}, "reasoning"),
        (RESPONSE, {"reasoning": {"effort": "none"}}, None),
        (RESPONSE, {"text": {"verbosity": "low"}}, "text.verbosity"),
        (RESPONSE, {"context_management": [{"type": "compaction"}]}, "context_management"),
        (RESPONSE, {"include": ["file_search_call.results"]}, "include.file_search_call.results"),
        (MESSAGE, {"thinking": {"type": "adaptive"}}, "thinking"),
        (MESSAGE, {"thinking": {"type": "enabled", "budget_tokens": 2000}}, "thinking"),
        (MESSAGE, {"thinking": {"type": "disabled"}}, None),
        (MESSAGE, {"output_config": {"effort": "low"}}, "output_config.effort"),
        (MESSAGE, {"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management"),
        (
            COUNT,
            {"thinking": {"type": "adaptive"}, "context_management": {"edits": [1]}},
            "context_management, thinking",
        ),
    ],
)
async def test_known_fields_that_change_nothing_are_named(
    open_site: OpenSite, path: str, change: dict[str, Any], named: str | None
) -> None:
    async with open_site() as site:
        assert (await sent(site, path, {**BODIES[path], **change}))[:2] == (200, named)


async def test_an_error_names_them_too(open_site: OpenSite) -> None:
    async with open_site() as site:
        assert (await sent(site, CHAT, {"messages": HI, "chat_id": 1, "n": 10**6}))[:2] == (400, "chat_id")


def test_what_is_logged_and_named_is_bounded() -> None:
    with structlog.testing.capture_logs() as lines:
        fields = IgnoredFields(structlog.get_logger())
        for round_ in range(40):
            with fields.noted() as names:
                for number in range(2 * MOST_NAMES):
                    note(f"{round_}\r\nset-cookie: ä{number}" + "x" * 1000)
                    note("always", "sometimes")
            assert len(names) == MOST_NAMES and all(len(name) <= 64 for name in names)
    assert len(lines) == MOST_LOGGED
    assert [line["meant"] for line in lines if line["field"] == "always"] == ["sometimes"]
    assert all(line["field"].isascii() and "\n" not in line["field"] and ":" not in line["field"] for line in lines)
    note("outside")  # of any request: nothing happens


def test_what_holds_no_struct_is_left_as_it_is() -> None:
    """Not even decoded: a number that no float has arrives as it was sent."""
    body = b' {"messages": [{"role": "user", "content": "\\u00e9", "n": 1.00000000000000000001}], "a": 1, "n": 2 } '
    unknown: dict[str, str] = {}
    kept = without_unknown(body, ChatBody, unknown)
    assert kept == b'{"messages":[{"role": "user", "content": "\\u00e9", "n": 1.00000000000000000001}],"n":2}'
    assert unknown == {"a": ""}


def test_only_what_a_header_names_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[str] = []
    monkeypatch.setattr(ignored_fields, "close_to", lambda name, known: compared.append(name) or "")
    without_unknown(json.dumps({f"field{each}": 1 for each in range(5000)}).encode(), ChatBody, {})
    assert len(compared) == MOST_NAMES
