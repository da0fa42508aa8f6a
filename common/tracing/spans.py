"""Spans of one process, by the OpenTelemetry SDK, to a collector over OTLP/HTTP (`tracing.endpoint`).

    start, span ─▶ SDK ─▶ queue of ended spans ─▶ a thread of its own ─▶ exporter ─▶ collector
                             │ full: dropped           │ refused: dropped
                             └── cohort_trace_spans_dropped_total{reason} ──┘

Callers never wait: a span that ends is put into a bounded queue, and a collector that is slow or gone costs spans, and
they are counted. `Tracing.opened` gives None where tracing is off, and then the SDK is not even imported.
"""

from __future__ import annotations

import atexit
import logging
import random
import threading
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import structlog

from cohort import __version__
from cohort.common.clock import Clock
from cohort.common.config import TracingConfig
from cohort.common.errors import ConfigError
from cohort.common.process.metrics import MetricFactory
from cohort.common.process.service import ServiceContext
from cohort.common.tracing.traceparent import TraceParent, parse

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span, Tracer

QUEUE_SPANS = 8192
"""Number of ended spans that may wait for export; more are dropped, and counted."""
BATCH_SPANS = 512
EXPORT_S = 5.0
"""Timeout of one export."""
EXPORT_EVERY_S = 1.0
END_S = 2.0
"""Time at the end of the process to export what is left."""

Attributes = Mapping[str, str | int | float | bool]


class SpanQueue:
    """The SDK's span processor: `on_end` is called wherever a span ends, all else happens in one daemon thread."""

    def __init__(
        self, exporter: SpanExporter, limit: int, metrics: MetricFactory, log: structlog.stdlib.BoundLogger
    ) -> None:
        self._exporter = exporter
        self._limit = limit
        self._log = log
        self._exported = metrics.counter("trace_spans_exported", "Spans that the collector took")
        self._dropped = metrics.counter(
            "trace_spans_dropped", "Spans that were lost: queue_full, export_failed", ("reason",)
        )
        self._spans: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._ending = False
        self._failing = False
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def on_start(self, span: object, parent_context: object = None) -> None:
        """Ignore it: a span counts when it has ended."""

    def _on_ending(self, span: object) -> None:
        """Ignore it, too. Newer SDKs call this."""

    def on_end(self, span: ReadableSpan) -> None:
        if len(self._spans) >= self._limit or self._ending:
            self._dropped("queue_full").inc()
            return
        self._spans.append(span)
        if len(self._spans) >= BATCH_SPANS:
            self._wake.set()

    def shutdown(self) -> None:
        """Export what is left, for `END_S` at most."""
        self._ending = True
        self._wake.set()
        self._thread.join(END_S)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True

    def _run(self) -> None:
        ending = False
        while not ending:
            self._wake.wait(EXPORT_EVERY_S)
            self._wake.clear()
            ending = self._ending  # spans that ended before are in the queue
            while self._spans:
                self._export([self._spans.popleft() for _ in range(min(BATCH_SPANS, len(self._spans)))])

    def _export(self, spans: list[ReadableSpan]) -> None:
        try:
            taken = self._exporter.export(spans).name == "SUCCESS"
        except Exception as error:
            taken = False
            self._log.debug("spans not exported", error=str(error))
        if taken:
            self._exported().inc(len(spans))
        else:
            self._dropped("export_failed").inc(len(spans))
        if taken == self._failing:  # said once for each outage
            self._failing = not taken
            if taken:
                self._log.info("traces are exported again")
            else:
                self._log.warning("traces are not exported, spans are dropped: no collector answers")


class OpenSpan:
    """A span that has begun. `place`: the parent of the spans below it, in this process or another."""

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        context = span.get_span_context()
        self.place = TraceParent(context.trace_id, context.span_id)

    def note(self, **attributes: str | int | float | bool) -> None:
        self._span.set_attributes({f"cohort.{name}": value for name, value in attributes.items()})

    def attributes(self, attributes: Attributes) -> None:
        """Set attributes under names of OpenTelemetry's own conventions."""
        self._span.set_attributes(dict(attributes))

    def event(self, at_s: float, name: str, **attributes: str | int | float | bool) -> None:
        named = {f"cohort.{key}": value for key, value in attributes.items()}
        self._span.add_event(name, named, timestamp=self._tracing.wall_ns(at_s))

    def end(self, at_s: float, error: str = "") -> None:
        if error:
            self._tracing.fail(self._span, error)
        self._span.end(self._tracing.wall_ns(at_s))


class Tracing:
    """The tracer of one process. Times are seconds of the process's monotonic clock."""

    def __init__(
        self,
        *,
        config: TracingConfig,
        exporter: SpanExporter,
        resource: Mapping[str, str],
        clock: Clock,
        metrics: MetricFactory,
        log: structlog.stdlib.BoundLogger,
    ) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.sampling import ALWAYS_ON

        self._sample = config.sample
        self._random = random.Random()
        self._offset_s = _offset_s(clock)
        self.queue = SpanQueue(exporter, QUEUE_SPANS, metrics, log)
        provider = TracerProvider(
            sampler=ALWAYS_ON,  # the gateway has decided
            resource=Resource.create(dict(resource)),
            shutdown_on_exit=False,
        )
        provider.add_span_processor(self.queue)  # type: ignore[arg-type]  # by its methods; the class is not imported
        self._tracer: Tracer = provider.get_tracer("cohort", __version__)

    @staticmethod
    def opened(context: ServiceContext) -> Tracing | None:
        """Start the tracer; None where `tracing.endpoint` is empty. Raises `ConfigError` if it cannot be made."""
        config = context.config.tracing
        if not config.endpoint:
            return None
        exporter = _otlp_exporter(config)
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # an outage is said once, by `SpanQueue`
        tracing = Tracing(
            config=config,
            exporter=exporter,
            resource={
                "service.namespace": "cohort",
                "service.name": f"cohort-{context.role.replace('_', '-')}",
                "service.instance.id": context.instance,
                "service.version": __version__,
                "cohort.preset": context.config.name,
            },
            clock=context.clock,
            metrics=context.metrics,
            log=context.log,
        )
        atexit.register(tracing.queue.shutdown)
        context.log.info("traces", endpoint=config.endpoint, sample=config.sample)
        return tracing

    def wall_ns(self, at_s: float) -> int:
        return int((at_s + self._offset_s) * 1e9)

    def wanted(self, header: str) -> tuple[bool, TraceParent | None]:
        """Return whether a request with this header is traced, and the client's place in its trace. The client's own
        flag decides, without one the configured share."""
        client = parse(header) if header else None
        if client is not None:
            return client.sampled, client
        return self._random.random() < self._sample, None

    def start(self, name: str, at_s: float, parent: TraceParent | None, *, serves: bool = False) -> OpenSpan:
        """Start a span, and a trace if there is no parent. `serves`: the span answers another process."""
        from opentelemetry.trace import SpanKind

        kind = SpanKind.SERVER if serves else SpanKind.INTERNAL
        span = self._tracer.start_span(name, _below(parent), kind=kind, start_time=self.wall_ns(at_s))
        return OpenSpan(self, span)

    def span(
        self,
        name: str,
        started_s: float,
        ended_s: float,
        parent: TraceParent,
        *,
        error: str = "",
        **attributes: str | int | float | bool,
    ) -> None:
        """Record a span that has ended."""
        span = self.start(name, started_s, parent)
        if attributes:
            span.note(**attributes)
        span.end(max(started_s, ended_s), error)

    @staticmethod
    def fail(span: Span, error: str) -> None:
        from opentelemetry.trace import Status, StatusCode

        span.set_status(Status(StatusCode.ERROR, error))


def _below(parent: TraceParent | None) -> Context:
    """Return the SDK's context below `parent`, or an empty one, which begins a trace."""
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if parent is None:
        return Context()
    above = SpanContext(parent.trace_id, parent.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
    return set_span_in_context(NonRecordingSpan(above), Context())


def _otlp_exporter(config: TracingConfig) -> SpanExporter:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint: traces need OpenTelemetry, which is not installed here ({error}): "
            "pip install 'cohort-serve[otel]', or leave tracing.endpoint empty"
        ) from error
    if not config.endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"tracing.endpoint: {config.endpoint!r} is no address; write http://HOST:4318/v1/traces")
    return OTLPSpanExporter(endpoint=config.endpoint, timeout=EXPORT_S)


def _offset_s(clock: Clock) -> float:
    """Measure the offset from monotonic to wall time: the shortest of several readings, as the core may be lost."""
    samples = [(clock.now_s(), clock.wall_s(), clock.now_s()) for _ in range(5)]
    before_s, wall_s, after_s = min(samples, key=lambda sample: sample[2] - sample[0])
    return wall_s - (before_s + after_s) / 2
