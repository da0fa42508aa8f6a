"""One request and whole runs against a server that streams, fails, hangs and cuts connections."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

from cohort.common.errors import ConfigError
from cohort.common.workloads.arrivals import AllAtOnce, Arrivals, ClosedLoop, RandomArrivals
from cohort.common.workloads.generate import Drawn
from cohort.common.workloads.lengths import Fixed
from cohort.services.bench.http.load.client import Driver, HttpStreamClient, PreparedRequest, RequestRecord, RunLog
from cohort.services.bench.http.load.prompts import PromptFactory, Vocabulary, from_range
from cohort.services.bench.http.load.target import (
    Dialect,
    Preferences,
    RequestBuilder,
    Target,
    TargetError,
    base_url,
    check_context,
    discover,
    negotiate,
)
from cohort.services.bench.http.load.workload import RequestPlan, WorkloadSpec, build
from cohort.services.bench.http.results.report import max_in_flight
from tests.services.bench.http.conftest import FakeServer

IDS = Dialect("completions", "ids", True, True)
CHAT = Dialect("chat", "text", True, True)
PROMPTS = PromptFactory(from_range(1000, 2000), seed=0, salt=0)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as opened:
        yield opened


def target(server: FakeServer) -> Target:
    return Target("s", server.url, "tiny", "", 4096)


def prepare(server: FakeServer, plan: RequestPlan, dialect: Dialect = IDS) -> PreparedRequest:
    return RequestBuilder().build(target(server), dialect, PROMPTS, plan, "test")


async def send(
    session: aiohttp.ClientSession,
    server: FakeServer,
    *,
    output_tokens: int = 6,
    timeout_s: float = 5.0,
    dialect: Dialect = IDS,
) -> RequestRecord:
    plan = RequestPlan(0, None, 12, output_tokens)
    request = prepare(server, plan)
    if dialect.endpoint == "chat":
        body = b'{"model":"tiny","messages":[],"max_tokens":%d,"stream":true}' % output_tokens
        request = PreparedRequest(plan, body, {**request.headers})
    record = RequestRecord(plan)
    loop_start_s = asyncio.get_running_loop().time()
    await HttpStreamClient(session, server.url + dialect.path, timeout_s).stream(request, record, loop_start_s)
    return record


async def test_stamps_every_token(session: aiohttp.ClientSession, server: FakeServer) -> None:
    server.behaviour.first_token_s, server.behaviour.token_s = 0.1, 0.03
    server.behaviour.cached_tokens = 3
    record = await send(session, server)
    assert record.status == "completed"
    assert len(record.token_s) == 6
    ttft_s, tpot_s = record.ttft_s or 0.0, record.tpot_s or 0.0
    assert 0.1 <= ttft_s < 1.0 and tpot_s < 0.3
    # A first token that is read late shortens what follows: no token is read before it is sent.
    assert ttft_s + 5 * tpot_s >= 0.1 + 5 * 0.029
    assert (record.reported_prompt_tokens, record.reported_output_tokens, record.cached_tokens) == (12, 6, 3)


async def test_empty_chunks_are_no_tokens(session: aiohttp.ClientSession, server: FakeServer) -> None:
    """A chunk with only the role comes at once, the first token 0.1 s later; an empty chunk ends the answer."""
    server.behaviour.role_chunk = server.behaviour.empty_final_chunk = True
    server.behaviour.first_token_s = 0.1
    record = await send(session, server, dialect=CHAT)
    assert record.status == "completed"
    assert len(record.token_s) == 6
    assert record.ttft_s is not None and record.ttft_s >= 0.1
    assert record.end_s >= record.token_s[-1]


@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        ("http_500", "http_500", "made to fail"),
        ("http_429", "http_429", "made to fail"),
        ("mid_stream_error", "stream_error", "lost a worker"),
        ("truncate", "truncated", "without [DONE]"),
        ("cut", "disconnected", ""),
        ("garbage", "bad_event", "not json"),
        ("json", "not_a_stream", "application/json"),
        ("hang", "timeout", "0.3 s"),
    ],
)
async def test_failures_are_named(
    session: aiohttp.ClientSession, server: FakeServer, fault: str, kind: str, detail: str
) -> None:
    server.behaviour.fault = lambda index: fault
    record = await send(session, server, timeout_s=0.3 if fault == "hang" else 5.0)
    assert (record.status, record.error_kind) == ("failed", kind)
    assert detail in record.error_detail


async def test_a_closed_port_fails_the_request(session: aiohttp.ClientSession) -> None:
    server = FakeServer(url="http://127.0.0.1:9")
    record = await send(session, server)
    assert (record.status, record.error_kind) == ("failed", "connect")


async def run(
    session: aiohttp.ClientSession,
    server: FakeServer,
    arrivals: Arrivals,
    count: int,
    *,
    stop: asyncio.Event | None = None,
    duration_s: float | None = None,
) -> RunLog:
    workload = build(WorkloadSpec(Drawn(Fixed(8), Fixed(4)), arrivals, count))
    requests = [prepare(server, plan) for plan in workload.plans]
    client = HttpStreamClient(session, server.url + IDS.path, 5.0)
    async with asyncio.timeout(20):
        return await Driver(client, requests, arrivals, stop=stop, duration_s=duration_s).run()


async def test_open_loop_does_not_wait_for_answers(session: aiohttp.ClientSession, server: FakeServer) -> None:
    server.behaviour.first_token_s = 0.5
    log = await run(session, server, RandomArrivals(100.0, 0.0), 20)
    assert [r.status for r in log.records] == ["completed"] * 20
    assert max_in_flight(log.records) == 20
    assert [r.due_s for r in log.records] == pytest.approx([i / 100 for i in range(20)])
    assert all(0 <= r.client_queue_s < 0.4 for r in log.records)
    assert log.loop_lag_s and not log.interrupted


async def test_closed_loop_keeps_its_concurrency(session: aiohttp.ClientSession, server: FakeServer) -> None:
    server.behaviour.answered_once = lambda number: 3  # so many came: those of the start are there together
    log = await run(session, server, ClosedLoop(3), 12)
    assert len(log.records) == 12
    assert max_in_flight(log.records) == 3


async def test_duration_ends_a_closed_loop(session: aiohttp.ClientSession, server: FakeServer) -> None:
    server.behaviour.first_token_s = 0.1
    log = await run(session, server, ClosedLoop(2), 1000, duration_s=0.45)
    assert 2 <= len(log.records) <= 12
    assert {r.status for r in log.records} == {"completed"}


async def test_stop_cancels_and_keeps_finished_requests(session: aiohttp.ClientSession, server: FakeServer) -> None:
    server.behaviour.fault = lambda index: "hang" if index >= 3 else None
    stop = asyncio.Event()
    running = asyncio.create_task(run(session, server, AllAtOnce(), 10, stop=stop))
    async with asyncio.timeout(20):
        while len(server.bodies) < 10 or server.answered < 3:  # noqa: ASYNC110 -- it has no events for its tests
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.4)
    stop.set()
    log = await running
    assert log.interrupted
    assert sorted(r.status for r in log.records) == ["cancelled"] * 7 + ["completed"] * 3


async def test_discover(session: aiohttp.ClientSession, server: FakeServer) -> None:
    server.behaviour.root = "/models/tiny"
    found = await discover(session, "s", server.url + "/v1/", None, 5)
    assert found == Target("s", server.url, "tiny", "/models/tiny", 4096)
    server.behaviour.models = ("a", "b")
    with pytest.raises(TargetError, match=r"2 models \(a, b\); choose one with --model"):
        await discover(session, "s", server.url, None, 5)
    assert (await discover(session, "s", server.url, "b", 5)).model == "b"
    server.behaviour.lists_models = False
    assert await discover(session, "s", server.url, "b", 5) == Target("s", server.url, "b", "", 0)
    with pytest.raises(TargetError, match=r"answers 500.*--model"):
        await discover(session, "s", server.url, None, 5)
    with pytest.raises(TargetError, match="cannot be reached"):
        await discover(session, "s", "http://127.0.0.1:9", None, 5)
    async with await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0) as hanging_up:
        port = hanging_up.sockets[0].getsockname()[1]
        with pytest.raises(TargetError, match="does it serve https"):
            await discover(session, "s", f"http://127.0.0.1:{port}", None, 5)


async def test_discover_where_models_are_listed_for_a_key_only(
    session: aiohttp.ClientSession, server: FakeServer
) -> None:
    server.behaviour.api_key = "k"
    with pytest.raises(TargetError, match="answers 401: wrong key"):
        await discover(session, "s", server.url, None, 5)
    assert (await discover(session, "s", server.url, None, 5, api_key="k")).model == "tiny"


def test_the_tokenizer_of_a_pipeline_here_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COHORT_CACHE_DIR", str(tmp_path))
    model, run = tmp_path / "tiny", tmp_path / "run" / "8000"
    model.mkdir()
    (model / "tokenizer.json").write_text("{}")
    run.mkdir(parents=True)
    (run / "resolved.yaml").write_text(f"model: {{path: {model}}}\n")
    target = Target("s", "http://127.0.0.1:8000", "served", "tiny", 0)
    assert target.local_tokenizer == model
    for other in (
        replace(target, root="another"),  # what runs there now is not what is configured
        replace(target, base_url="http://127.0.0.1:8001"),
        replace(target, base_url="http://far.example:8000"),
    ):
        assert other.local_tokenizer is None


def test_urls() -> None:
    assert {base_url(u) for u in ("h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/")} == {"http://h:1"}
    assert base_url("https://h/api/v1") == "https://h/api"


class _WordTokenizer(PromptFactory):
    """Words without a tokenizer file: text is what the server splits at spaces."""

    def text(self, plan: RequestPlan) -> str:
        return " ".join(["word"] * plan.prompt_tokens)


WORDS = _WordTokenizer(Vocabulary(from_range(5, 9).token_ids, ("word",), "test"), seed=0, salt=0)


async def agree(session: aiohttp.ClientSession, server: FakeServer, *, text_possible: bool = True) -> Dialect:
    preferences = Preferences(None, None, ignore_eos=True, text_possible=text_possible)
    return await negotiate(session, target(server), preferences, WORDS, RequestBuilder(), 5.0)


async def test_negotiation_gives_up_only_refused_parameters(session: aiohttp.ClientSession, server: FakeServer) -> None:
    assert await agree(session, server) == Dialect("completions", "ids", True, True)
    server.behaviour.takes_ignore_eos = False
    assert await agree(session, server) == Dialect("completions", "ids", False, True)
    server.behaviour.takes_ids = False
    assert await agree(session, server) == Dialect("completions", "text", False, True)
    server.behaviour.has_completions = False
    assert await agree(session, server) == Dialect("chat", "text", False, True)
    server.behaviour.takes_usage = False
    assert await agree(session, server) == Dialect("chat", "text", False, False)


async def test_negotiation_explains_itself(session: aiohttp.ClientSession, server: FakeServer) -> None:
    server.behaviour.takes_ids = False
    with pytest.raises(TargetError, match=r"(?s)prompt must be a string.*--tokenizer"):
        await agree(session, server, text_possible=False)
    server.behaviour.fault = lambda index: "http_503"
    with pytest.raises(TargetError, match="http_503"):
        await agree(session, server)


def test_context_is_checked_before_the_run() -> None:
    small = Target("s", "u", "m", "", 100)
    check_context(small, (RequestPlan(0, None, 60, 40),))
    with pytest.raises(ConfigError, match=r"1 of 2 .* 101 tokens.*--max-prompt"):
        check_context(small, (RequestPlan(0, None, 60, 40), RequestPlan(1, None, 61, 40)))
