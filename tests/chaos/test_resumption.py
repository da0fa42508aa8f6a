"""kill -9 of the gateway while clients stream: they resume, and each text is that of an undisturbed run.

At the next start of the same gateway, and at another one that shares nothing with it but the file of streams.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from cohort.common.config import dump_config, load_config
from cohort.common.http.ports import free_port
from tests.chaos.conftest import whole
from tests.chaos.streams import DECODE
from tests.e2e.clients.client_scripts import run_here
from tests.e2e.forked import fork
from tests.e2e.pipeline import Pipeline

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

STREAMS = 18
NEW_TOKENS = 48
DEADLINE_S = 120.0


def bodies(model: str) -> list[tuple[str, dict[str, Any]]]:
    """All four APIs: greedy, seeded, with log-probabilities, bound to a form, and of two choices."""
    made: list[tuple[str, dict[str, Any]]] = []
    for index in range(STREAMS):
        body: dict[str, Any] = {"max_tokens": NEW_TOKENS, "seed": index, "temperature": 0.8 if index % 2 else 0}
        question = f"Tell me about the number {index}."
        match index % 6:
            case 4:
                asked = {"input": question, "max_output_tokens": NEW_TOKENS, "top_logprobs": 1, "seed": index}
                made.append(("/v1/responses", {**asked, "temperature": 0.8}))
            case 5:
                messages = [{"role": "user", "content": question}]
                made.append(
                    ("/v1/messages", {"model": model, "messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0})
                )
            case 0:
                made.append(("/v1/completions", {**body, "prompt": question, "ignore_eos": True}))
            case 1:
                made.append(("/v1/completions", {**body, "prompt": question, "logprobs": 1, "n": 2}))
            case 2:
                made.append(("/v1/chat/completions", {**body, "messages": [{"role": "user", "content": question}]}))
            case _:
                made.append(("/v1/completions", {**body, "prompt": question, "guided_regex": "([a-z]{3,8} ){60}"}))
    return made


@dataclass
class Got:
    """Over all connections of one client."""

    token: str = ""
    last: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    scored: dict[int, list[str]] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    usage: tuple[int, int] = (0, 0)
    kinds: list[str] = field(default_factory=list)
    """Of named events, which are numbered from 0 on."""
    done: bool = False
    breaks: int = 0

    def take(self, lines: dict[str, str]) -> None:
        if lines["data"] == "[DONE]":
            self.done = True
            return
        event = json.loads(lines["data"])
        assert "error" not in event, event
        if "event" in lines:
            self.take_named(event, lines)
            return
        self.last = lines["id"]
        if event.get("usage"):
            self.usage = (event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"])
        for choice in event["choices"]:
            index = choice["index"]
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            self.texts[index] = self.texts.get(index, "") + text
            self.scored.setdefault(index, []).extend((choice.get("logprobs") or {}).get("tokens") or [])
            if choice["finish_reason"]:
                self.finish[index] = choice["finish_reason"]

    def take_named(self, event: dict[str, Any], lines: dict[str, str]) -> None:
        if event["type"] == "ping":
            return
        self.last = lines["id"]
        assert int(self.last) == len(self.kinds) == event.get("sequence_number", len(self.kinds)), "no gap, no double"
        self.kinds.append(event["type"])
        match event["type"]:
            case "response.output_text.delta":
                self.texts[0] = self.texts.get(0, "") + event["delta"]
                self.scored.setdefault(0, []).extend(each["token"] for each in event["logprobs"])
            case "content_block_delta":
                self.texts[0] = self.texts.get(0, "") + event["delta"]["text"]
            case "response.completed" | "response.incomplete":
                [message] = event["response"]["output"]
                assert message["content"][0]["text"] == self.texts[0]
                self.usage = (event["response"]["usage"]["input_tokens"], event["response"]["usage"]["output_tokens"])
                self.done = True
            case "message_delta":
                self.usage = (0, event["usage"]["output_tokens"])
                self.finish[0] = event["delta"]["stop_reason"]
            case "message_stop":
                self.done = True


async def read(response: aiohttp.ClientResponse, got: Got) -> None:
    got.token = response.headers["x-cohort-resume"]
    lines: dict[str, str] = {}
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line:
            name, value = line.split(": ", 1)
            lines[name] = value
        else:
            got.take(lines)
            lines = {}


async def client(url: str, path: str, body: dict[str, Any], resume_at: str, got: Got) -> Got:
    """Streams, and resumes at that server until all is there."""
    asked = {**body, "stream": True}
    if "completions" in path:
        asked["stream_options"] = {"include_usage": True}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=DEADLINE_S)) as session:
        try:
            async with session.post(url + path, json=asked, headers={"x-cohort-resume": "keep"}) as response:
                assert response.status == 200, await response.text()
                await read(response, got)
        except aiohttp.ClientError:
            got.breaks += 1
        deadline = time.monotonic() + DEADLINE_S
        while not got.done:
            assert time.monotonic() < deadline and got.token, got
            headers = {"Last-Event-ID": got.last}
            with contextlib.suppress(aiohttp.ClientConnectionError):  # it is not there yet
                async with session.get(f"{resume_at}/v1/streams/{got.token}", headers=headers) as response:
                    if response.status == 200:
                        await read(response, got)
                    else:
                        assert response.status in (429, 503), await response.text()
            await asyncio.sleep(0.2)
    return got


def all_clients(pipeline: Pipeline, resume_at: str) -> list[tuple[Got, asyncio.Task[Got]]]:
    """What each has got, to be looked at under way."""
    started = []
    for path, body in bodies(Path(pipeline._given["model"]["path"]).name):
        got = Got()
        started.append((got, asyncio.create_task(client(pipeline.url, path, body, resume_at, got))))
    return started


async def disturbed(pipeline: Pipeline, resume_at: str, disturb: Callable[[], None]) -> list[Got]:
    """The disturbance comes when a quarter of the text is said, and every client has the beginning of its own: the
    worker says no more before."""
    choices = sum(body.get("n", 1) for _, body in bodies(""))
    with pipeline.hold(DECODE) as go_on:
        clients = all_clients(pipeline, resume_at)
        await asyncio.to_thread(pipeline.wait_at, DECODE, choices)
        await asyncio.to_thread(go_on, STREAMS * NEW_TOKENS // 4, choices)
        deadline = time.monotonic() + DEADLINE_S
        while not all(got.token for got, _ in clients):
            assert time.monotonic() < deadline, clients
            await asyncio.sleep(0.02)
        await asyncio.to_thread(disturb)
    return await asyncio.gather(*(task for _, task in clients))


def check(answers: list[Got], undisturbed: list[Got]) -> None:
    assert sum(got.breaks for got in answers) > STREAMS // 2, "the gateway died too late to break much"
    for ours, theirs in zip(answers, undisturbed, strict=True):
        assert (ours.texts, ours.finish, ours.scored) == (theirs.texts, theirs.finish, theirs.scored)
        assert (ours.usage, ours.kinds) == (theirs.usage, theirs.kinds)


@pytest.fixture(scope="module")
def undisturbed(running: Pipeline) -> list[Got]:
    async def run() -> list[Got]:
        return await asyncio.gather(*(task for _, task in all_clients(running, running.url)))

    answers = asyncio.run(run())
    assert all(got.done and not got.breaks for got in answers)
    return answers


def test_a_killed_gateway_goes_on_after_its_next_start(pipeline: Pipeline, undisturbed: list[Got]) -> None:
    def kill_and_start() -> None:
        pipeline.kill("gateway")
        pipeline.start("gateway")

    check(asyncio.run(disturbed(pipeline, pipeline.url, kill_and_start)), undisturbed)
    whole(pipeline)
    pipeline.assert_nothing_left(timeout_s=40.0)


def test_openai_with_the_transport_of_its_page_goes_on_across_a_kill(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script as it stands there, once undisturbed and once with a gateway that dies amid the stream."""
    transports = pytest.importorskip("httpx2").HTTPTransport
    sent: list[str] = []
    send = transports.handle_request

    def recorded(transport: Any, request: Any) -> Any:
        response = send(transport, request)
        sent.append(f"{request.method} {request.url.path.partition('streams')[1]} {response.status_code}")
        return response

    monkeypatch.setattr(transports, "handle_request", recorded)
    heading = "`openai`: streams that outlive their gateway"
    whole_text = run_here(heading, pipeline)["streamed"]
    assert len(whole_text) > 5 and sent == ["POST  200"]
    with ThreadPoolExecutor(1) as threads:
        with pipeline.hold(DECODE) as go_on:
            running = threads.submit(run_here, heading, pipeline)
            pipeline.wait_at(DECODE, 1)
            go_on(4, 1)
            deadline = time.monotonic() + DEADLINE_S
            while len(sent) < 2:  # its client has headers
                assert time.monotonic() < deadline and not running.done()
                time.sleep(0.02)
            pipeline.kill("gateway")
            pipeline.start("gateway")
        assert running.result(DEADLINE_S)["streamed"] == whole_text
    assert sent[1] == "POST  200" and sent[-1] == "GET streams 200"
    whole(pipeline)
    pipeline.assert_nothing_left(timeout_s=40.0)


@contextlib.contextmanager
def second_gateway(pipeline: Pipeline) -> Iterator[str]:
    """Its address."""
    port, folder = free_port(), pipeline.folder
    given = {**pipeline._given, "gateway": {**pipeline._given["gateway"], "port": port}}
    given |= {"endpoints": {**pipeline._given.get("endpoints", {}), "gateway": f"ipc://{folder}/run/gateway-2.sock"}}
    file = folder / "second.yaml"
    file.write_text(dump_config(load_config(preset="disaggregated", overrides=given)), encoding="utf-8")
    arguments = ["--config", str(file), "--instance", "gateway-2", "--run-dir", str(folder / "run")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1"}
    with (folder / "gateway-2.log").open("ab") as log:
        process = fork("cohort.services.gateway", arguments, environment, log)
    try:
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            assert process.poll() is None, (folder / "gateway-2.log").read_text()[-3000:]
            with contextlib.suppress(OSError):
                pipeline.get("/ready", port)
                break
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)


def test_another_gateway_goes_on_with_the_streams_of_a_killed_one(pipeline: Pipeline, undisturbed: list[Got]) -> None:
    with second_gateway(pipeline) as other:
        check(asyncio.run(disturbed(pipeline, other, lambda: pipeline.kill("gateway"))), undisturbed)
    whole(pipeline)
    pipeline.assert_nothing_left(timeout_s=40.0)
