"""The anthropic package's own client against a live port, where it is installed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.gateway.conftest import ANSWER, OpenSite, Site
from tests.services.gateway.test_structured_output import CALLS, roomy  # noqa: F401

anthropic = pytest.importorskip("anthropic")
HI: Any = [{"role": "user", "content": "Hi"}]


def client_of(site: Site, **credentials: str) -> Any:
    return anthropic.AsyncAnthropic(base_url=site.url, max_retries=0, **credentials)


@pytest.fixture
async def keyed(open_site: OpenSite) -> AsyncIterator[Site]:
    async with open_site(api_keys=("sk-1",)) as site:
        yield site


async def test_messages_whole_streamed_and_counted(keyed: Site) -> None:
    for credentials in ({"api_key": "sk-1"}, {"auth_token": "sk-1"}):
        async with client_of(keyed, **credentials) as client:
            answer = await client.messages.create(model="tiny", messages=HI, max_tokens=100)
            assert (answer.content[0].text, answer.stop_reason) == (ANSWER, "end_turn")
    async with client_of(keyed, api_key="sk-1") as client:
        async with client.messages.stream(model="tiny", messages=HI, max_tokens=100) as stream:
            assert "".join([text async for text in stream.text_stream]) == ANSWER
            final = await stream.get_final_message()
        assert final.usage.model_dump(exclude_none=True) == answer.usage.model_dump(exclude_none=True)
        counted = await client.messages.count_tokens(model="tiny", messages=HI)
        assert counted.input_tokens == answer.usage.input_tokens + answer.usage.cache_read_input_tokens


async def test_calls_that_are_streamed(open_site: OpenSite, roomy: Path) -> None:  # noqa: F811
    tools: Any = [{"name": "weather", "input_schema": {"type": "object"}}]
    async with open_site(CALLS, model=roomy) as site, client_of(site, api_key="none") as client:
        ask = client.messages.stream(model="roomy", messages=HI, max_tokens=400, tools=tools)
        async with ask as stream:
            final = await stream.get_final_message()
    assert final.stop_reason == "tool_use" and [block.type for block in final.content] == ["text", *["tool_use"] * 2]
    assert final.content[1].input == {"city": "Köln"} and final.content[2].input == {}


async def test_errors_are_the_packages_own(keyed: Site) -> None:
    async with client_of(keyed, api_key="sk-1") as client:
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.create(model="claude", messages=HI, max_tokens=1)
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(model="tiny", messages=HI, max_tokens=1, extra_body={"temperature": 9})
    async with client_of(keyed, api_key="wrong") as client:
        with pytest.raises(anthropic.AuthenticationError):
            await client.messages.create(model="tiny", messages=HI, max_tokens=1)
