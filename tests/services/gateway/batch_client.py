"""What a client of batches does, with the openai package's own: input files, beginning, waiting, reading results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import openai
from openai.types import Batch

from tests.services.gateway.conftest import Site

PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions"}
ENDED = ("completed", "failed", "cancelled", "expired")


def job(*bodies: dict[str, Any], kind: str = "text") -> bytes:
    """An input file; custom ids count from 0."""
    return b"".join(
        json.dumps({"custom_id": str(index), "method": "POST", "url": PATHS[kind], "body": body}).encode() + b"\n"
        for index, body in enumerate(bodies)
    )


def ask(prompt: str = "x", **more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": prompt, "max_tokens": 100, **more}


@asynccontextmanager
async def client_of(site: Site, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=site.url + "/v1", api_key=key, max_retries=0) as client:
        yield client


async def begin(client: openai.AsyncOpenAI, data: bytes, kind: str = "text", window: Any = "24h", **more: Any) -> Batch:
    file = await client.files.create(file=("job.jsonl", data), purpose="batch")
    return await client.batches.create(
        input_file_id=file.id,
        endpoint=PATHS[kind],
        completion_window=window,
        **more,  # type: ignore[arg-type]
    )


async def until(
    client: openai.AsyncOpenAI, batch: Batch, condition: Callable[[Batch], bool], timeout_s: float = 60.0
) -> Batch:
    async with asyncio.timeout(timeout_s):
        while not condition(batch := await client.batches.retrieve(batch.id)):  # noqa: ASYNC110 -- as a client polls
            await asyncio.sleep(0.01)
    return batch


async def ended(client: openai.AsyncOpenAI, batch: Batch, timeout_s: float = 60.0) -> Batch:
    return await until(client, batch, lambda now: now.status in ENDED, timeout_s)


async def lines(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    """By custom id."""
    assert file_id is not None
    text = (await client.files.content(file_id)).text
    found = [json.loads(line) for line in text.splitlines()]
    assert len({line["custom_id"] for line in found}) == len(found)
    return {line["custom_id"]: line for line in found}
