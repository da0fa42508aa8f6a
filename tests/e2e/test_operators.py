"""What an operator does beside a real pipeline: follow one request through all processes, change a log level, ask the
doctor, look at the live picture."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import aiohttp
import pytest
import torch
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from cohort.services.cli.__main__ import main
from tests.e2e.pipeline import Pipeline
from tests.e2e.tiny_models import qwen2, save
from tests.services.gateway.tiny_model import byte_level

pytestmark = [pytest.mark.pipeline, pytest.mark.slow]

TRACE = "0af7651916cd43dd8448eb211c80319c"


class Collector(HTTPServer):
    """Takes spans over OTLP/HTTP, as a collector does."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[tuple[str, Span]] = []

    def of_trace(self, trace_id: str) -> list[tuple[str, Span]]:
        return [(service, span) for service, span in self.spans if span.trace_id.hex() == trace_id]


class _Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        for resource in request.resource_spans:
            names = {item.key: item.value.string_value for item in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.server.spans += [(names["service.name"], span) for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Pipeline]:
    torch.manual_seed(7)
    folder = tmp_path_factory.mktemp("pipeline")
    model = folder / "model"
    save(qwen2(), model)
    byte_level(400).save(str(model / "tokenizer.json"))
    overrides = {
        "tracing": {"endpoint": f"http://127.0.0.1:{collector.server_port}/v1/traces", "sample": 0.0},
        "policies": {"placement": "disaggregated"},
        "logging": {"format": "json"},
        "kv": {"memory_bytes": 64 * 12_288, "host_memory_bytes": 0},
    }
    with Pipeline(folder, model, overrides) as running:
        yield running


def eventually(what: str, condition: object, within_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


async def ask(pipeline: Pipeline, header: dict[str, str]) -> None:
    body = {"prompt": [5] * 40, "max_tokens": 8, "ignore_eos": True}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{pipeline.url}/v1/completions", json=body, headers=header) as response,
    ):
        assert response.status == 200, await response.text()


def test_one_trace_through_all_processes(pipeline: Pipeline, collector: Collector) -> None:
    asyncio.run(ask(pipeline, {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}))
    wanted = {
        ("cohort-gateway", "POST /v1/completions"),
        ("cohort-gateway", "parse"),
        ("cohort-gateway", "tokenise"),
        ("cohort-gateway", "admission"),
        ("cohort-length-predictor", "predict length"),
        ("cohort-bucketing-manager", "queue"),
        ("cohort-bucketing-manager", "placement"),
        ("cohort-prefill-worker", "segment"),
        ("cohort-prefill-worker", "wait"),
        ("cohort-prefill-worker", "prefill"),
        ("cohort-prefill-worker", "send KV"),
        ("cohort-decode-worker", "segment"),
        ("cohort-decode-worker", "receive KV"),
        ("cohort-decode-worker", "decode"),
    }
    eventually(
        f"missing: {wanted - {(service, span.name) for service, span in collector.of_trace(TRACE)}}",
        lambda: wanted <= {(service, span.name) for service, span in collector.of_trace(TRACE)},
    )
    spans = [span for _, span in collector.of_trace(TRACE)]
    (root,) = [span for span in spans if span.name == "POST /v1/completions"]
    assert root.parent_span_id.hex() == "b7ad6b7169203331"
    ids = {span.span_id for span in spans}
    assert all(span.parent_span_id in ids for span in spans if span is not root)
    for span in spans:  # one host, one clock: everything lies within the request, but for the KV's last word
        assert root.start_time_unix_nano - 5_000_000 <= span.start_time_unix_nano <= root.end_time_unix_nano
    asyncio.run(ask(pipeline, {}))
    assert {span.trace_id.hex() for _, span in collector.spans} == {TRACE}, "sample is 0: no other one is traced"


def test_the_level_of_a_log_changes_while_it_is_written(pipeline: Pipeline) -> None:
    log = pipeline.folder / "gateway.log"

    def levels() -> set[str]:
        return {json.loads(line)["level"] for line in log.read_text().splitlines() if line.startswith("{")}

    assert "debug" not in levels()
    os.kill(pipeline.processes["gateway"].pid, signal.SIGUSR2)
    eventually("no level changed", lambda: "log level changed" in log.read_text())
    asyncio.run(ask(pipeline, {}))
    eventually("nothing was said at level debug", lambda: "debug" in levels())
    os.kill(pipeline.processes["gateway"].pid, signal.SIGUSR2)
    eventually("no way back", lambda: log.read_text().count("log level changed") == 2)


def test_the_doctor_and_the_live_picture(pipeline: Pipeline, capsys: pytest.CaptureFixture[str]) -> None:
    asyncio.run(ask(pipeline, {}))
    monitor = f"http://127.0.0.1:{pipeline.config.monitor.port}"
    eventually("the monitor has not heard of all", lambda: main(["doctor", "--url", monitor]) == 0)
    capsys.readouterr()
    main(["doctor", "--url", monitor, "--json"])
    found = {finding["check"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert found["processes"]["says"] == "6 answer" and found["versions"]["status"] == "ok"
    assert [check for check, finding in found.items() if "the check itself failed" in finding["says"]] == []
    assert main(["status", "--url", monitor]) == 0
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("model  preset cohort") and "6 of 6 processes ready" in lines[0]
    rt = next(line for line in lines if line.startswith("rt")).split()
    assert "ms" in rt and any(line.startswith("prefill-0") and "ready" in line for line in lines)
    pipeline.kill("predictor")
    eventually("the doctor sees no loss", lambda: main(["doctor", "--url", monitor]) == 1)
    # Which of the two, depends on whether its silence has lasted long enough.
    assert re.search(r"predictor(: no heartbeat| does not answer)", capsys.readouterr().out)
