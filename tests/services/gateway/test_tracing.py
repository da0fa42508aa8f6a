"""The gateway's part of a trace: the client's traceparent is continued, and its stages are there."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from opentelemetry.sdk.trace import ReadableSpan

from cohort.common.tracing.spans import Tracing
from cohort.common.tracing.traceparent import parse
from cohort.common.types import Request
from tests.common.tracing.collected import Collected
from tests.services.gateway.conftest import OpenSite, Site, eventually

TRACE = "0af7651916cd43dd8448eb211c80319c"
BODY = {"model": "tiny", "prompt": "the quick", "max_tokens": 8}


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> Collected:
    found = Collected()
    monkeypatch.setattr(Tracing, "opened", staticmethod(lambda context: found.tracing))
    return found


class Seen:
    """The requests that the manager got."""

    def __init__(self) -> None:
        self.requests: list[Request] = []

    def __call__(self, request: Request) -> list[int]:
        self.requests.append(request)
        return [40, 41, 42, 43, 44, 45, 46, 47][: request.sampling.max_tokens]


def noted(span: ReadableSpan) -> dict[str, Any]:
    return {name.removeprefix("cohort."): value for name, value in (span.attributes or {}).items()}


async def finished(site: Site) -> None:
    await eventually(site.nothing_left)


async def test_a_clients_trace_goes_on_through_the_gateway(open_site: OpenSite, collected: Collected) -> None:
    script = Seen()
    async with open_site(script) as site:
        header = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        status, _ = await site.post("/v1/completions", BODY, headers=header)
        assert status == 200
        await finished(site)
    spans = {span.name: span for span in collected.spans()}
    assert set(spans) == {"POST /v1/completions", "parse", "tokenise", "admission", "predict"}
    assert {f"{span.context.trace_id:032x}" for span in spans.values()} == {TRACE}
    root = spans["POST /v1/completions"]
    assert root.parent is not None and f"{root.parent.span_id:x}" == "b7ad6b7169203331"
    # What the manager and the workers hang their spans below:
    place = parse(script.requests[0].traceparent)
    assert place is not None and place.span_id == root.context.span_id and place.trace_id == root.context.trace_id
    order = [spans[name] for name in ("POST /v1/completions", "parse", "tokenise", "admission")]
    assert [span.start_time for span in order] == sorted(span.start_time or 0 for span in order)
    for name in ("parse", "tokenise", "admission", "predict"):
        assert spans[name].parent is not None and spans[name].parent.span_id == root.context.span_id
        assert (spans[name].end_time or 0) <= (root.end_time or 0)
    attributes = noted(root)
    assert attributes["http.response.status_code"] == 200
    assert attributes["outcome"] == "length" and attributes["output_tokens"] == 8
    assert attributes["request_id"] == script.requests[0].request_id
    assert {"ttft_tokenize_s", "ttft_predict_s", "ttft_bucket_s", "ttft_prefill_s"} <= set(attributes)
    assert [event.name for event in root.events] == ["first token", "last token", "choice ended"]


async def test_streams_choices_and_errors(open_site: OpenSite, collected: Collected) -> None:
    script = Seen()
    async with open_site(script) as site:
        events = await site.stream("/v1/completions", {**BODY, "n": 2})
        assert events[-1] == "[DONE]"
        assert (await site.post("/v1/completions", {"model": "tiny"}))[0] == 400
        assert (await site.get("/v1/models"))[0] == 200
        await finished(site)
    roots = [span for span in collected.spans() if span.name.startswith("POST")]
    assert len(roots) == 2, "only what generates is traced"
    streamed, refused = roots
    assert streamed.parent is None and noted(streamed)["choices"] == 2
    assert [event.name for event in streamed.events].count("choice ended") == 2
    assert {request.traceparent for request in script.requests} == {
        f"00-{streamed.context.trace_id:032x}-{streamed.context.span_id:016x}-01"
    }
    assert noted(refused)["http.response.status_code"] == 400 and refused.status.is_unset


async def test_a_client_that_does_not_record_is_not_traced(open_site: OpenSite, collected: Collected) -> None:
    script = Seen()
    async with open_site(script) as site:
        header = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-00"}
        assert (await site.post("/v1/completions", BODY, headers=header))[0] == 200
        await finished(site)
    assert script.requests[0].traceparent == "" and collected.spans() == []


async def test_off_no_request_says_anything_of_traces(open_site: OpenSite) -> None:
    script = Seen()
    async with open_site(script) as site:
        header = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        assert (await site.post("/v1/completions", BODY, headers=header))[0] == 200
        assert "cohort_trace_spans" not in await (await site.session.get(f"{site.url}/metrics")).text()
        await finished(site)
    assert script.requests[0].traceparent == ""


async def test_a_line_of_a_batch_has_a_trace_of_its_own(open_site: OpenSite, collected: Collected) -> None:
    async with open_site(Seen()) as site:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": BODY}
        form = {"purpose": "batch"}
        upload = aiohttp.FormData(form)
        upload.add_field("file", json.dumps(line).encode(), filename="lines.jsonl")
        async with site.session.post(f"{site.url}/v1/files", data=upload) as response:
            file = await response.json()
        batch = {"input_file_id": file["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        _, made = await site.post("/v1/batches", batch)

        async def done() -> bool:
            return bool((await site.get(f"/v1/batches/{made['id']}"))[1]["status"] == "completed")

        async with asyncio.timeout(20):
            while not await done():  # noqa: ASYNC110 -- over HTTP there is no event to wait for
                await asyncio.sleep(0.02)
    roots = [span for span in collected.spans() if span.parent is None]
    assert [span.name for span in roots] == ["batch line"]
    assert noted(roots[0])["outcome"] == "length"
