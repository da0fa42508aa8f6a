"""A server that speaks OpenAI-style streams and misbehaves on demand; the benchmark is tested against it.

It runs in a thread of its own, so that both coroutines and the synchronous command line can be tested against a real
socket.
"""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.typedefs import Handler

from cohort.services.bench.http.load import client


@dataclass
class Behaviour:
    """What the server does; tests change it before they send. `fault` names what goes wrong with request i (0-based,
    counted over generation requests); None: nothing."""

    first_token_s: float = 0.0
    token_s: float = 0.0
    fault: Callable[[int], str | None] = lambda index: None
    takes_ids: bool = True
    takes_ignore_eos: bool = True
    takes_usage: bool = True
    has_completions: bool = True
    role_chunk: bool = False
    empty_final_chunk: bool = False
    stops_after: int | None = None
    extra_prompt_tokens: int = 0
    cached_tokens: int = 0
    answered_once: Callable[[int], int] = lambda number: 0
    """How many measured requests must have arrived before the `number`th of them (1-based) is answered."""
    max_model_len: int = 4096
    root: str = ""
    models: tuple[str, ...] = ("tiny",)
    lists_models: bool = True
    api_key: str = ""
    """That every request must bear."""


@dataclass
class FakeServer:
    """`bodies` and `headers` are what generation requests held, `ports` the client's they came from, in order of
    arrival."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    ports: list[int] = field(default_factory=list)
    url: str = ""
    disconnects: int = 0
    answered: int = 0

    def measured(self) -> list[dict[str, Any]]:
        """Bodies without the negotiation's and the warm-up's."""
        return [
            body
            for body, headers in zip(self.bodies, self.headers, strict=True)
            if not headers["x-request-id"].startswith(("bench-probe", "bench-warm-up"))
        ]

    def app(self) -> web.Application:
        app = web.Application(client_max_size=1 << 26, middlewares=[self._authorise])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._chat)
        return app

    @web.middleware
    async def _authorise(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        key = self.behaviour.api_key
        if key and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": {"message": "wrong key"}}, status=401)
        return await handler(request)

    async def _models(self, request: web.Request) -> web.Response:
        asked = self.behaviour
        if not asked.lists_models:
            return web.Response(status=500, text="Internal Server Error")
        return web.json_response(
            {
                "object": "list",
                "data": [
                    {"id": name, "object": "model", "root": asked.root, "max_model_len": asked.max_model_len}
                    for name in asked.models
                ],
            }
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if not self.behaviour.has_completions:
            return web.json_response({"error": {"message": "no such route"}}, status=404)
        if isinstance(body["prompt"], list) and not self.behaviour.takes_ids:
            return web.json_response({"error": {"message": "prompt must be a string"}}, status=400)
        return await self._generate(request, body, chat=False)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, await request.json(), chat=True)

    async def _generate(self, request: web.Request, body: dict[str, Any], chat: bool) -> web.StreamResponse:
        asked = self.behaviour
        if (body.get("ignore_eos") and not asked.takes_ignore_eos) or (
            body.get("stream_options") and not asked.takes_usage
        ):
            return web.json_response({"error": {"message": "unknown field"}}, status=422)
        index = len(self.bodies)
        self.bodies.append(body)
        self.headers.append({k.lower(): v for k, v in request.headers.items()})
        number = len(self.measured())
        if request.transport is not None:
            self.ports.append(request.transport.get_extra_info("peername")[1])
        fault = asked.fault(index)
        if fault is not None and fault.startswith("http_"):
            return web.json_response({"error": {"message": f"made to fail: {fault}"}}, status=int(fault[5:]))
        if fault == "json":
            return web.json_response({"choices": [{"text": "not streamed"}]})
        if fault == "hang":
            await asyncio.sleep(60)
        while len(self.measured()) < asked.answered_once(number):  # noqa: ASYNC110 -- a count that others raise
            await asyncio.sleep(0.001)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        try:
            await self._events(response, request, body, chat, fault)
        except (ConnectionError, asyncio.CancelledError):
            self.disconnects += 1
            raise
        self.answered += 1
        return response

    async def _events(
        self, response: web.StreamResponse, request: web.Request, body: dict[str, Any], chat: bool, fault: str | None
    ) -> None:
        asked = self.behaviour

        async def send(payload: object) -> None:
            await response.write(f"data: {json.dumps(payload)}\n\n".encode())

        count = body["max_tokens"]
        if asked.stops_after is not None and not body.get("ignore_eos"):
            count = min(count, asked.stops_after)
        if chat and asked.role_chunk:
            await send({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        await asyncio.sleep(asked.first_token_s)
        for position in range(count):
            if position:
                await asyncio.sleep(asked.token_s)
            if fault == "mid_stream_error" and position == count // 2:
                await send({"error": {"message": "lost a worker", "code": 500}})
                await response.write(b"data: [DONE]\n\n")
                return
            if fault == "garbage" and position == 1:
                await response.write(b"data: {not json\n\n")
            if fault == "cut" and position == count // 2:
                assert request.transport is not None
                request.transport.abort()
                return
            last = position == count - 1 and not asked.empty_final_chunk and fault != "truncate"
            await send(self._chunk(chat, "x ", "length" if last else None))
        if asked.empty_final_chunk:
            await send(self._chunk(chat, "", "length"))
        if body.get("stream_options", {}).get("include_usage"):
            prompt = body.get("prompt", "")
            tokens = len(prompt) if isinstance(prompt, list) else len(str(prompt).split())
            await send(
                {
                    "choices": [],
                    "usage": {
                        "prompt_tokens": tokens + asked.extra_prompt_tokens,
                        "completion_tokens": count,
                        "prompt_tokens_details": {"cached_tokens": asked.cached_tokens},
                    },
                }
            )
        if fault != "truncate":
            await response.write(b"data: [DONE]\n\n")

    @staticmethod
    def _chunk(chat: bool, text: str, finish_reason: str | None) -> dict[str, Any]:
        content = {"delta": {"content": text} if text else {}} if chat else {"text": text}
        return {"choices": [{"index": 0, "finish_reason": finish_reason, **content}]}


@pytest.fixture(autouse=True)
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a run measures on an event loop's clock, which stands still while this process is not scheduled."""

    def now_s() -> float:
        try:
            return asyncio.get_running_loop().time()
        except RuntimeError:
            return time.monotonic()

    monkeypatch.setattr(client, "now_s", now_s)


@pytest.fixture(autouse=True)
def imports_stay_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would thaw at its end what tests/conftest.py froze, and the next one go through it for a second."""
    monkeypatch.setattr(gc, "unfreeze", lambda: None)


@pytest.fixture
def serve() -> Iterator[Callable[[], FakeServer]]:
    """Starts a server on a free port of this machine; all are stopped at the end of the test."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runners: list[web.AppRunner] = []

    async def start(server: FakeServer) -> None:
        runner = web.AppRunner(server.app(), handler_cancellation=True, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        runners.append(runner)
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"

    def make() -> FakeServer:
        server = FakeServer()
        asyncio.run_coroutine_threadsafe(start(server), loop).result(timeout=10)
        return server

    async def stop() -> None:
        for runner in runners:
            await runner.cleanup()

    try:
        yield make
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(timeout=10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=10)
        loop.close()


@pytest.fixture
def server(serve: Callable[[], FakeServer]) -> FakeServer:
    return serve()
