"""A request whose TTFT cannot be kept, over HTTP: 429 with Retry-After before any token, else an error event; what the
client wants instead; and what metrics and log say of it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog
from prometheus_client import CollectorRegistry
from structlog.testing import CapturingLogger

from cohort.common.machines.entry import Entry
from cohort.common.messages import Placed, Refused, TokenUpdate
from cohort.common.process.metrics import MetricFactory, RequestMetrics
from cohort.common.types import Attempt, FinishReason, Request, SamplingParams, Slo
from cohort.services.gateway.generation.delta import GatewayTimes
from cohort.services.gateway.generation.request_stats import RequestStats
from tests.services.gateway.conftest import OpenSite, Site, eventually

SOON = {"prompt": "x", "max_tokens": 100, "cohort": {"ttft_slo_ms": 500}}


async def submitted(site: Site, count: int = 1) -> list[Request]:
    await eventually(lambda: len(site.manager.submitted) >= count)
    return site.manager.submitted


def refuse(site: Site, request: Request, retry_after_s: float = 2.2) -> None:
    site.manager.bus.send("gateway", Refused(request.attempt, 429, "busy", "infeasible", retry_after_s, 3.25))


async def metrics_of(site: Site) -> str:
    async with site.session.get(site.url + "/metrics") as response:
        text: str = await response.text()
        return text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("retry_after_s", "header"), [(2.2, "3"), (0.0, "1"), (1e9, "120")])
async def test_a_refusal_is_a_429_that_says_when_to_come_again(
    site: Site, stream: bool, retry_after_s: float, header: str
) -> None:
    site.manager.place = False
    asking = asyncio.create_task(site.session.post(site.url + "/v1/completions", json={**SOON, "stream": stream}))
    [request] = await submitted(site)
    await asyncio.sleep(0.02)
    assert not asking.done(), "no header has left: the status is still open"
    refuse(site, request, retry_after_s)
    async with await asking as response:
        assert (response.status, response.headers["Retry-After"]) == (429, header)
        assert response.headers["Content-Type"].startswith("application/json")
        error = (await response.json())["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "3.25 s" in error["message"] and "0.5 s" in error["message"]
    await eventually(site.nothing_left)
    text = await metrics_of(site)
    [line] = [line for line in text.splitlines() if line.startswith("cohort_requests_refused_total{")]
    assert 'reason="infeasible"' in line and line.endswith(" 1.0")
    [missed] = [line for line in text.splitlines() if line.startswith("cohort_slo_requests_total{") and "ttft" in line]
    assert 'outcome="missed"' in missed and missed.endswith(" 1.0")
    [ended] = [line for line in text.splitlines() if line.startswith("cohort_request_success_total{")]
    assert 'finished_reason="refused"' in ended and ended.endswith(" 1.0")
    stats = site.gateway.streams.stats.recorded
    assert (stats["refused_total"], stats["failed_total"], stats["rejected_total"]) == (1, 0, 0)
    assert "cohort_e2e_request_latency_seconds_count" not in text, "a refusal is no latency"


async def test_a_stream_begins_with_its_first_token_not_with_its_placement(site: Site) -> None:
    """Waiting for the verdict costs no TTFT: headers never left earlier than the first event."""
    site.manager.place = False
    asking = asyncio.create_task(site.session.post(site.url + "/v1/completions", json={**SOON, "stream": True}))
    [request] = await submitted(site)
    site.manager.bus.send("gateway", Placed(request.attempt, ["worker-0"], 0.0, "test"))
    await asyncio.sleep(0.02)
    assert not asking.done()
    site.manager.workers[0].send([TokenUpdate(request.attempt, request.prompt_tokens, [40])])
    async with await asking as response:
        assert response.status == 200


async def test_with_one_choice_all_are_refused_before_any_token(site: Site) -> None:
    site.manager.place = False
    asking = asyncio.create_task(site.post("/v1/completions", {**SOON, "n": 3, "stream": True}))
    requests = await submitted(site, 3)
    site.manager.bus.send("gateway", Placed(requests[0].attempt, ["worker-0"], 0.0, "test"))
    refuse(site, requests[1])
    status, body = await asking
    assert (status, body["error"]["type"]) == (429, "rate_limit_error")
    await eventually(site.nothing_left)
    named = {attempt.request_id for attempt in site.manager.cancelled}
    assert {requests[0].request_id, requests[2].request_id} <= named


async def test_a_refusal_beside_a_choice_that_streams_is_an_event(open_site: OpenSite) -> None:
    async with open_site(step_s=0.0) as site:
        site.manager.place = False
        asking = asyncio.create_task(site.stream("/v1/completions", {**SOON, "n": 2}))
        first, second = await submitted(site, 2)
        site.manager.bus.send("gateway", Placed(first.attempt, ["worker-0"], 0.0, "test"))
        site.manager.workers[0].send([TokenUpdate(first.attempt, first.prompt_tokens, [40])])
        await eventually(lambda: any(entry.output for entry in site.gateway.streams.ledger.entries()))
        await asyncio.sleep(0.02)
        refuse(site, second)
        *_, error, done = await asking
        assert (error["error"]["code"], done) == ("rate_limit_exceeded", "[DONE]")
        await eventually(site.nothing_left)
        assert first.request_id in {attempt.request_id for attempt in site.manager.cancelled}


@pytest.mark.parametrize(
    ("headers", "body", "expected"),
    [
        ({}, {}, ""),
        ({}, {"tpot_slo_ms": 50}, ""),
        ({}, {"ttft_slo_ms": 500}, "refuse"),
        ({"x-cohort-ttft-slo-ms": "500"}, {}, "refuse"),
        ({}, {"ttft_slo_ms": 500, "if_late": "serve"}, "serve"),
        ({}, {"if_late": "best_effort"}, "best_effort"),
        ({"x-cohort-if-late": " Best_Effort "}, {"ttft_slo_ms": 500, "if_late": "serve"}, "best_effort"),
    ],
)
async def test_what_the_client_wants_reaches_the_manager(
    site: Site, headers: dict[str, str], body: dict[str, Any], expected: str
) -> None:
    for path, more in (
        ("completions", {"prompt": "x"}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        status, _ = await site.post(f"/v1/{path}", {**more, "max_tokens": 2, "cohort": body}, headers=headers)
        assert (status, site.manager.submitted[-1].if_late) == (200, expected)


@pytest.mark.parametrize("value", ["", "later", None, 3])
async def test_another_wish_is_a_400(site: Site, value: Any) -> None:
    if value is not None:
        status, body = await site.post("/v1/completions", {"prompt": "x", "cohort": {"if_late": value}})
        assert (status, body["error"]["param"]) == (400, "cohort.if_late")
    headers = {"x-cohort-if-late": str(value)}
    status, body = await site.post("/v1/completions", {"prompt": "x"}, headers=headers)
    assert (status, body["error"]["param"]) == (400, "x-cohort-if-late")


async def test_a_demoted_request_is_answered_and_says_so(site: Site) -> None:
    site.manager.place = False
    asked = {**SOON, "max_tokens": 1, "cohort": {"ttft_slo_ms": 500, "if_late": "best_effort"}}
    asking = asyncio.create_task(site.post("/v1/completions", asked))
    [request] = await submitted(site)
    site.manager.bus.send("gateway", Placed(request.attempt, ["worker-0"], 0.0, "test", True, 3.25))
    site.manager.workers[0].send(
        [TokenUpdate(request.attempt, request.prompt_tokens, [40], finish=FinishReason.LENGTH)]
    )
    status, body = await asking
    [extras] = body["cohort"]["requests"]
    assert (status, extras["class"], extras["best_effort"]) == (200, "rt", True)
    text = await metrics_of(site)
    [line] = [line for line in text.splitlines() if line.startswith("cohort_requests_demoted_total{")]
    assert 'class="rt"' in line and line.endswith(" 1.0")


async def test_other_answers_do_not_speak_of_it(site: Site) -> None:
    _, body = await site.post("/v1/completions", SOON)
    assert "best_effort" not in body["cohort"]["requests"][0]


def logged(**changes: Any) -> dict[str, Any]:
    """The line of a request that ended like this."""
    logger = CapturingLogger()
    log = structlog.wrap_logger(logger, processors=[lambda _logger, _name, event: ((), event)])
    make = MetricFactory(CollectorRegistry(), model_name="m", instance="g")
    stats = RequestStats(RequestMetrics(make), log)  # type: ignore[arg-type]
    request = Request(Attempt("r", 0), "g", [1, 2], 2, SamplingParams(4), 0.0, slo=Slo(ttft_s=0.5))
    entry = Entry(request, 0.0, 9.0)
    for name, value in changes.items():
        setattr(entry, name, value)
    stats.admitted(request)
    finish = FinishReason.FAILED if entry.refused_because else FinishReason.STOP
    stats.ended(1.0, entry, GatewayTimes(0.0), finish, "")
    [call] = logger.calls
    return {"level": call.method_name, **call.kwargs}


def test_the_log_has_forecast_and_slo_of_what_was_refused_or_demoted() -> None:
    refused = logged(refused_because="infeasible", forecast_s=3.25)
    said = {name: refused[name] for name in ("level", "event", "status", "forecast_ttft_s", "slo_ttft_s")}
    assert said == {
        "level": "info",
        "event": "request refused",
        "status": "infeasible",
        "forecast_ttft_s": 3.25,
        "slo_ttft_s": 0.5,
    }
    demoted = logged(best_effort=True, forecast_s=3.25)
    assert (demoted["event"], demoted["best_effort"], demoted["forecast_ttft_s"]) == ("request finished", True, 3.25)
    plain = logged()
    assert (plain["event"], plain["best_effort"], "forecast_ttft_s" in plain) == ("request finished", None, False)
