"""The openai package's own client against a live port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import openai
import pytest

from tests.services.gateway.cluster import state_of
from tests.services.gateway.conftest import ANSWER, OpenSite, Site


@pytest.fixture
async def keyed(open_site: OpenSite) -> AsyncIterator[Site]:
    async with open_site(api_keys=("sk-1",)) as site:
        yield site


@pytest.fixture
async def client(keyed: Site) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=keyed.url + "/v1", api_key="sk-1", max_retries=0) as client:
        yield client


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=2, seed=1
    )
    plain = answer.model_dump()
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert plain["choices"][0]["logprobs"]["content"][0]["token"] == "The"
    assert plain["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    assert plain["cohort"]["requests"][0]["attempts"] == 1


async def test_chat_stream(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == ANSWER
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage and chunks[-1].usage.completion_tokens > 5


async def test_completions_stream_and_not(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(model="tiny", prompt=["a", "b"], max_tokens=100, logprobs=1)
    assert [choice.text for choice in answer.choices] == [ANSWER, ANSWER]
    stream = await client.completions.create(model="tiny", prompt=[5, 6], max_tokens=100, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == ANSWER


async def test_embeddings(keyed: Site, client: openai.AsyncOpenAI) -> None:
    """Without a format the package asks for base64, and reads it."""
    by_text = await client.embeddings.create(model="tiny", input=["The fox", "Köln"])
    as_floats = await client.embeddings.create(model="tiny", input=["The fox", "Köln"], encoding_format="float")
    assert [each.embedding for each in by_text.data] == [each.embedding for each in as_floats.data]
    last = keyed.manager.submitted[1].tokens[-1]
    assert by_text.data[1].index == 1 and by_text.data[1].embedding == state_of(last)
    by_ids = await client.embeddings.create(model="tiny", input=[5, 6, last], dimensions=3)
    assert by_ids.data[0].embedding == state_of(last)[:3]
    assert (by_ids.usage.prompt_tokens, by_ids.usage.total_tokens) == (3, 3)
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(model="tiny", input="x", dimensions=9)
    assert caught.value.param == "dimensions"


async def test_responses_whole_streamed_and_gone_on_with(client: openai.AsyncOpenAI) -> None:
    answer = await client.responses.create(model="tiny", input="Hi", metadata={"a": "b"})
    assert (answer.output_text, answer.status, answer.metadata) == (ANSWER, "completed", {"a": "b"})
    async with client.responses.stream(model="tiny", input="More", previous_response_id=answer.id) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed" and final.output_text == ANSWER
    read = await client.responses.retrieve(final.id)
    assert read.output_text == final.output_text and read.previous_response_id == answer.id
    items = await client.responses.input_items.list(final.id, order="asc")
    assert [item.type for item in items.data] == ["message"] * 3
    await client.responses.delete(final.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(final.id)
    begun = await client.responses.create(model="tiny", input="Hi", background=True)
    assert begun.status == "in_progress"
    async with asyncio.timeout(10):
        while (ended := await client.responses.retrieve(begun.id)).status == "in_progress":  # noqa: ASYNC110 -- over HTTP there is no event
            await asyncio.sleep(0.01)
    assert ended.output_text == ANSWER and (await client.responses.cancel(begun.id)).status == "completed"
    followed = await client.responses.retrieve(begun.id, stream=True, starting_after=1)
    first = await anext(aiter(followed))
    assert first.sequence_number == 2


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).id == "tiny"


async def test_errors_are_the_packages_own(keyed: Site, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="gpt-9", prompt="x")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="tiny", prompt="x", temperature=9)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="wrong").models.list()
    keyed.context.stopping.set()
    with pytest.raises(openai.InternalServerError):
        await client.completions.create(model="tiny", prompt="x")
