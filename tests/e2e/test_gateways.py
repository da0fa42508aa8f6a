"""Two gateways on one port: both serve, one that is killed takes only its own streams along, a batch runs once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from cohort.services.gateway.batches.batch_files import folder_of
from cohort.services.gateway.batches.batch_store import BatchStore
from tests.e2e.equality.golden import kv_bytes
from tests.e2e.pipeline import Pipeline

pytestmark = pytest.mark.pipeline

GATEWAYS = ("gateway", "gateway-1")
WORKER = "unified-0"
STREAMS = 16
NEW_TOKENS = 48
LINES, TOKENS = 24, 8
DEADLINE_S = 120.0


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, small_model: Path) -> Iterator[Pipeline]:
    overrides = {
        "gateway": {"processes": 2},
        "model": {"max_model_len": 1024},
        "kv": {"memory_bytes": kv_bytes(small_model, 284)},
        "batch": {"concurrency": 2},
    }
    made = Pipeline(tmp_path_factory.mktemp("gateways"), small_model, overrides, preset="unified")
    made.held.add(WORKER)
    with made as running:
        until_ready(running)
        yield running


def until_ready(pipeline: Pipeline) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not all(pipeline.state().get(name, {}).get("ready") for name in GATEWAYS):
        assert time.monotonic() < deadline, pipeline.state()
        time.sleep(0.1)


def requests_of(pipeline: Pipeline) -> dict[str, float]:
    """Accepted by each gateway so far, once that stands still."""
    before: dict[str, float] = {}
    while (now := {name: pipeline.heard(name).get("requests_total", 0.0) for name in GATEWAYS}) != before:
        before = now
        pipeline.wait_told()
    return now


def body(index: int, tokens: int = NEW_TOKENS) -> dict[str, Any]:
    return {"prompt": f"{index} and {index + 1} are", "max_tokens": tokens, "temperature": 0, "ignore_eos": True}


@dataclass
class Got:
    """What one client was sent, over all its connections."""

    token: str = ""
    last: str = ""
    text: str = ""
    done: bool = False
    breaks: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)


async def read(response: aiohttp.ClientResponse, got: Got) -> None:
    got.token = response.headers.get("x-cohort-resume", "")
    last = ""
    async for raw in response.content:
        name, _, value = raw.decode().rstrip("\n").partition(": ")
        if name == "id":
            last = value
        elif name == "data" and value == "[DONE]":
            got.done = True
        elif name == "data":
            event = json.loads(value)
            assert "error" not in event, event
            got.last = last
            got.text += "".join(choice["text"] for choice in event["choices"])
            got.begun.set()


async def stream(pipeline: Pipeline, index: int, got: Got, *, resumes: bool) -> None:
    """On a connection of its own, so that the kernel chooses a gateway for each; resumed until all is there."""
    headers = {"x-cohort-resume": "keep"} if resumes else {}
    deadline = time.monotonic() + DEADLINE_S
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
        asked = {**body(index), "stream": True}
        try:
            async with session.post(f"{pipeline.url}/v1/completions", json=asked, headers=headers) as response:
                assert response.status == 200, await response.text()
                await read(response, got)
        except aiohttp.ClientError:
            got.breaks += 1
        while resumes and not got.done:
            assert time.monotonic() < deadline, got
            place = {"Last-Event-ID": got.last}
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with session.get(f"{pipeline.url}/v1/streams/{got.token}", headers=place) as response:
                    assert response.status in (200, 429, 503), await response.text()
                    if response.status == 200:
                        await read(response, got)
            await asyncio.sleep(0.1)


async def run_streams(pipeline: Pipeline, *, killed: str = "") -> tuple[list[Got], list[Got]]:
    """As many plain streams as resumable ones, of the same requests; a gateway dies once all have begun."""
    plain, kept = [[Got() for _ in range(STREAMS)] for _ in range(2)]
    async with asyncio.TaskGroup() as tasks:
        with pipeline.hold(WORKER) as go_on:
            for index in range(STREAMS):
                tasks.create_task(stream(pipeline, index, plain[index], resumes=False))
                tasks.create_task(stream(pipeline, index, kept[index], resumes=True))
            await asyncio.to_thread(pipeline.wait_behind_the_gateway, 2 * STREAMS)
            await asyncio.to_thread(go_on, 8 * STREAMS, 2 * STREAMS)
            for got in (*plain, *kept):
                await got.begun.wait()
            if killed:
                await asyncio.to_thread(pipeline.kill, killed)
    return plain, kept


@pytest.fixture(scope="module")
def undisturbed(pipeline: Pipeline) -> list[str]:
    """The texts of the streams, each seen twice."""
    plain, kept = asyncio.run(run_streams(pipeline))
    texts = [got.text for got in plain]
    assert all(got.done and not got.breaks for got in (*plain, *kept))
    assert [got.text for got in kept] == texts
    return texts


def test_both_gateways_serve_the_port_and_have_metrics_of_their_own(pipeline: Pipeline, undisturbed: list[str]) -> None:
    assert all(undisturbed)
    served = requests_of(pipeline)
    assert sum(served.values()) == 2 * STREAMS
    assert all(served.values()), "the kernel gave every connection to one gateway"
    urls = {name: pipeline.state()[name]["metrics_url"] for name in GATEWAYS}
    assert len(set(urls.values())) == len(GATEWAYS)
    for name, url in urls.items():
        with urllib.request.urlopen(url, timeout=5) as answer:
            text = answer.read().decode()
        assert f'instance="{name}"' in text
        assert not any(f'instance="{other}"' in text for other in GATEWAYS if other != name)


def test_a_killed_gateway_takes_its_own_streams_along_and_those_to_resume_go_on_at_the_other(
    pipeline: Pipeline, undisturbed: list[str]
) -> None:
    plain, kept = asyncio.run(run_streams(pipeline, killed="gateway-1"))
    broken = [got for got in (*plain, *kept) if got.breaks]
    assert 0 < len(broken) < 2 * STREAMS
    assert [got.text for got in kept] == undisturbed
    for got, text in zip(plain, undisturbed, strict=True):
        assert (got.text == text) if got.done else text.startswith(got.text)
        assert got.done != bool(got.breaks)
    pipeline.start("gateway-1")
    until_ready(pipeline)


def job(client: openai.OpenAI) -> str:
    """A batch of `LINES`; its id."""
    data = b"".join(
        json.dumps(
            {"custom_id": str(index), "method": "POST", "url": "/v1/completions", "body": body(index, TOKENS)}
        ).encode()
        + b"\n"
        for index in range(LINES)
    )
    file = client.files.create(file=("job.jsonl", data), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h").id


def results(pipeline: Pipeline, batch_id: str) -> dict[int, bytes]:
    store = BatchStore(folder_of(pipeline.config, GATEWAYS[0]) / "batches.sqlite")
    try:
        return dict(store.results(batch_id, succeeded=True, after=0, page_bytes=1 << 20))
    finally:
        store.close()


def until_ended(pipeline: Pipeline, batch_id: str) -> list[bytes]:
    """The lines of its output. Every look is a connection of its own, so any gateway may answer."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        batch = pipeline.get(f"/v1/batches/{batch_id}")
        if batch["status"] == "completed":
            break
        assert batch["status"] in ("validating", "in_progress", "finalizing") and time.monotonic() < deadline, batch
        time.sleep(0.1)
    assert batch["request_counts"] == {"total": LINES, "completed": LINES, "failed": 0}
    with urllib.request.urlopen(f"{pipeline.url}/v1/files/{batch['output_file_id']}/content", timeout=5) as content:
        lines: list[bytes] = content.read().splitlines()
    assert [json.loads(line)["custom_id"] for line in lines] == [str(index) for index in range(LINES)]
    return lines


def test_batches_given_to_either_gateway_run_once(pipeline: Pipeline) -> None:
    before = requests_of(pipeline)
    with openai.OpenAI(base_url=pipeline.url + "/v1", api_key="none", max_retries=0) as client:
        first = job(client)
    with openai.OpenAI(base_url=pipeline.url + "/v1", api_key="none", max_retries=0) as client:
        second = job(client)
    for batch_id in (first, second):
        until_ended(pipeline, batch_id)
    after = requests_of(pipeline)
    assert sorted(after[name] - before[name] for name in GATEWAYS) == [0, 2 * LINES]


def test_another_gateway_goes_on_with_the_batches_of_one_that_is_killed(pipeline: Pipeline) -> None:
    before = requests_of(pipeline)
    with pipeline.hold(WORKER) as go_on:
        with openai.OpenAI(base_url=pipeline.url + "/v1", api_key="none", max_retries=0) as client:
            batch_id = job(client)
        go_on(LINES // 2 * TOKENS)
        deadline = time.monotonic() + DEADLINE_S
        while len(results(pipeline, batch_id)) < LINES // 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        pipeline.wait_told()
        [runner] = [name for name in GATEWAYS if pipeline.heard(name).get("requests_total", 0.0) > before[name]]
        pipeline.kill(runner)
        finished = results(pipeline, batch_id)
    assert LINES // 4 <= len(finished) < LINES, "the gateway died too late to interrupt anything"
    lines = until_ended(pipeline, batch_id)
    for number, result in finished.items():
        assert lines[number - 1] == result, "a finished line was run again"
    pipeline.start(runner)
    until_ready(pipeline)
