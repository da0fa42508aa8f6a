"""A tracer whose spans a test can read."""

from __future__ import annotations

from typing import Any

import structlog
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from cohort.common.clock import Clock, SystemClock
from cohort.common.config import TracingConfig
from cohort.common.process.metrics import MetricFactory
from cohort.common.tracing.spans import Tracing


class Collected:
    """`tracing`, and what it has exported."""

    def __init__(self, exporter: Any = None, clock: Clock | None = None, **options: Any) -> None:
        self.exporter = exporter if exporter is not None else InMemorySpanExporter()
        self.registry = CollectorRegistry()
        self.tracing = Tracing(
            config=TracingConfig(endpoint="http://127.0.0.1:4318/v1/traces", **options),
            exporter=self.exporter,
            resource={"service.name": "cohort-test"},
            clock=clock or SystemClock(),
            metrics=MetricFactory(self.registry, model_name="m", instance="i"),
            log=structlog.get_logger("test"),
        )

    def spans(self) -> list[ReadableSpan]:
        """All of them; ends the exporting."""
        self.tracing.queue.shutdown()
        return list(self.exporter.get_finished_spans())

    def counted(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, {"model_name": "m", "instance": "i", **labels}) or 0.0
