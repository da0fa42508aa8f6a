"""How spans leave a process: in the background, counted when they are lost, and not at all where tracing is off."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.trace import SpanKind

from cohort.common.config import Config, TracingConfig
from cohort.common.errors import ConfigError
from cohort.common.tracing import spans
from cohort.common.tracing.observed import Observed, traced
from cohort.common.tracing.spans import Tracing
from cohort.common.tracing.traceparent import TraceParent
from tests.common.tracing.collected import Collected

PARENT = TraceParent(0xABC, 0xDEF)


class Stuck:
    """A collector that takes nothing until it is let go, and then refuses."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.let_go = threading.Event()
        self.sizes: list[int] = []

    def export(self, batch: Sequence[ReadableSpan]) -> SpanExportResult:
        self.sizes.append(len(batch))
        self.asked.set()
        self.let_go.wait(20)
        return SpanExportResult.FAILURE


def test_a_span_has_its_times_its_place_and_its_words() -> None:
    collected = Collected()
    collected.tracing.span("queue", 10.0, 10.5, PARENT, request_id="r1")
    with_error = collected.tracing.start("segment", 10.0, None, serves=True)
    with_error.event(10.25, "preempted", detail="swap")
    with_error.end(11.0, "the worker died")
    queue, segment = collected.spans()
    assert queue.context.trace_id == PARENT.trace_id and queue.parent is not None
    assert queue.parent.span_id == PARENT.span_id and queue.parent.is_remote
    assert queue.end_time - queue.start_time == pytest.approx(0.5e9, abs=1e3)  # type: ignore[operator]
    assert dict(queue.attributes or {}) == {"cohort.request_id": "r1"}
    assert segment.parent is None and segment.kind is SpanKind.SERVER
    assert segment.status.description == "the worker died" and not segment.status.is_ok
    (event,) = segment.events
    assert event.name == "preempted" and event.timestamp - segment.start_time == pytest.approx(0.25e9, abs=1e3)  # type: ignore[operator]
    assert collected.counted("cohort_trace_spans_exported_total") == 2


def test_a_process_that_loses_its_core_between_its_two_clocks_has_right_times() -> None:
    class Clock:
        """0.25 s go by after the first three looks at wall time; it was 1000 when the process's clock was 0."""

        at_s, looks = 5.0, 0

        def now_s(self) -> float:
            return self.at_s

        def wall_s(self) -> float:
            self.looks, at_s = self.looks + 1, self.at_s
            self.at_s += 0.25 * (self.looks <= 3)
            return 1000.0 + at_s

    collected = Collected(clock=Clock())
    collected.tracing.span("queue", 10.0, 10.5, PARENT)
    (queue,) = collected.spans()
    assert queue.start_time == 1010 * 10**9


def test_a_collector_that_is_gone_costs_spans_and_not_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exporter hangs; callers go on, the queue stays within its limit, and every span is accounted for."""
    stuck = Stuck()
    monkeypatch.setattr(spans, "QUEUE_SPANS", 600)
    collected = Collected(stuck)
    for _ in range(spans.BATCH_SPANS):
        collected.tracing.span("queue", 0.0, 1.0, PARENT)
    assert stuck.asked.wait(20)
    left = collected.tracing
    for _ in range(1000):
        left.span("queue", 0.0, 1.0, PARENT)
    full = collected.counted("cohort_trace_spans_dropped_total", reason="queue_full")
    assert full >= 400 and len(left.queue._spans) <= 600
    stuck.let_go.set()
    left.queue.shutdown()
    failed = collected.counted("cohort_trace_spans_dropped_total", reason="export_failed")
    assert full + failed == spans.BATCH_SPANS + 1000
    assert collected.counted("cohort_trace_spans_exported_total") == 0


def test_an_exporter_that_fails_is_as_one_that_refuses() -> None:
    def broken(_: object) -> SpanExportResult:
        raise RuntimeError("no such host")

    collected = Collected(SimpleNamespace(export=broken))
    collected.tracing.span("queue", 0.0, 1.0, PARENT)
    collected.tracing.queue.shutdown()
    assert collected.counted("cohort_trace_spans_dropped_total", reason="export_failed") == 1


def test_the_clients_flag_decides_and_else_the_share() -> None:
    never, always = Collected(sample=0.0).tracing, Collected(sample=1.0).tracing
    for tracing, unasked in ((never, False), (always, True)):
        assert tracing.wanted("") == (unasked, None)
        assert tracing.wanted("garbage") == (unasked, None)
        assert tracing.wanted(str(PARENT)) == (True, PARENT)
        unsampled = TraceParent(1, 2, False)
        assert tracing.wanted(str(unsampled)) == (False, unsampled)
    some = Collected(sample=0.5).tracing
    assert {some.wanted("")[0] for _ in range(200)} == {True, False}


def context(endpoint: str = "") -> SimpleNamespace:
    return SimpleNamespace(config=Config(tracing=TracingConfig(endpoint=endpoint)))


def test_off_the_machine_is_the_machine_and_the_sdk_is_not_loaded() -> None:
    machine = SimpleNamespace(handle=lambda now_s, *events: [], check=lambda: None)
    assert traced(context(), machine, lambda tracing: pytest.fail("made")) is machine  # type: ignore[arg-type]
    code = (
        "import sys\n"
        "import cohort.services.gateway.service, cohort.services.bucketing_manager.service\n"
        "import cohort.services.length_predictor.service, cohort.common.tracing.worker\n"
        "sys.exit('opentelemetry' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-P", "-c", code], timeout=120, check=False).returncode == 0


def test_asked_for_and_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"tracing\.endpoint: .*pip install 'cohort-serve\[otel\]'"):
        Tracing.opened(context("http://127.0.0.1:4318/v1/traces"))  # type: ignore[arg-type]


def test_an_endpoint_that_is_no_address() -> None:
    with pytest.raises(ConfigError, match=r"tracing\.endpoint: 'collector:4318' is no address"):
        Tracing.opened(context("collector:4318"))  # type: ignore[arg-type]


def test_an_observer_that_fails_does_not_stop_the_machine() -> None:
    calls: list[float] = []

    def handled(now_s: float, *_: object) -> None:
        calls.append(now_s)
        raise RuntimeError("a defect")

    machine = SimpleNamespace(handle=lambda now_s, *events: [now_s, *events], check=lambda: None)
    errors: list[str] = []
    log = SimpleNamespace(exception=errors.append)
    observed = Observed(machine, SimpleNamespace(handled=handled), lambda: 0.0, log)  # type: ignore[arg-type,var-annotated]
    assert observed.handle(1.0, "a") == [1.0, "a"]
    assert observed.handle(2.0, "b") == [2.0, "b"]
    assert calls == [1.0] and len(errors) == 1
