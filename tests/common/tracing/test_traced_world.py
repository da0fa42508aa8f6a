"""Whole traces, of real machines in the virtual cluster: every stage is there, in order, and nothing is left open,
whatever breaks."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import msgspec
import pytest
import structlog
from opentelemetry.sdk.trace import ReadableSpan

from cohort.common.machines.events import Offered
from cohort.common.policies.baselines.placements import Colocated, Disaggregated
from cohort.common.tracing.manager import ManagerSpans
from cohort.common.tracing.observed import Observed
from cohort.common.tracing.traceparent import TraceParent
from cohort.common.tracing.worker import WorkerSpans
from cohort.common.virtual_cluster.cluster import MANAGER
from cohort.common.virtual_cluster.plugins import Node, WorkerNode
from tests.common.machines import clusters
from tests.common.machines.clusters import PD, PD_TWICE, UNIFIED, finish
from tests.common.machines.test_world import requests
from tests.common.machines.world import SplitAnywhere, World
from tests.common.tracing.collected import Collected


class _WorldClock:
    def __init__(self, world: World) -> None:
        self._world = world

    def now_s(self) -> float:
        return self._world.now_s if hasattr(self._world, "cluster") else 0.0

    def wall_s(self) -> float:
        return 1e9 + self.now_s()


class TracedWorld(World):
    """Manager and workers are observed; requests r0, r1 … get traces 1, 2 …, all below span 7."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self.collected = Collected(clock=_WorldClock(self))
        self.observers: list[tuple[Node, ManagerSpans | WorkerSpans]] = []
        super().__init__(*args, **options)

    def _worker_made(self, node: WorkerNode, seed: int) -> None:
        self._observe(node, WorkerSpans(self.collected.tracing))

    def _checked(self, node: Node) -> None:
        if node.name == MANAGER:
            self._observe(node, ManagerSpans(self.collected.tracing))
        elif not isinstance(node, WorkerNode):
            handle = node.handle
            node.handle = lambda now_s, *events: handle(now_s, *(self._traced(event) for event in events))
        super()._checked(node)

    def _observe(self, node: Node, observer: Any) -> None:
        self.observers.append((node, observer))
        node.handle = Observed(node.machine, observer, lambda: self.cluster.now_s, structlog.get_logger()).handle

    @staticmethod
    def _traced(event: Any) -> Any:
        if not isinstance(event, Offered):
            return event
        place = TraceParent(int(event.offer_id[1:]) + 1, 7)
        marked = [msgspec.structs.replace(request, traceparent=str(place)) for request in event.requests]
        return msgspec.structs.replace(event, requests=marked)

    def traces(self) -> dict[str, list[ReadableSpan]]:
        """By request; every span lies in one of them."""
        found: dict[str, list[ReadableSpan]] = defaultdict(list)
        for span in self.collected.spans():
            found[f"r{span.context.trace_id - 1}"].append(span)
        return found


def names(spans: list[ReadableSpan]) -> list[str]:
    return sorted(span.name for span in spans)


def of(spans: list[ReadableSpan], name: str) -> list[ReadableSpan]:
    return sorted((span for span in spans if span.name == name), key=lambda span: span.start_time or 0)


def check_places(spans: list[ReadableSpan]) -> None:
    """Every span lies below the gateway's or one of the same trace, and within its time."""
    known = {span.context.span_id: span for span in spans}
    for span in spans:
        assert span.parent is not None and span.start_time is not None and span.end_time is not None
        above = known.get(span.parent.span_id)
        if above is None:
            assert span.parent.span_id == 7, f"{span.name} lies below a span that was never exported"
        else:
            assert above.start_time is not None and above.end_time is not None
            assert above.name == "segment"
            assert above.start_time - 1000 <= span.start_time <= span.end_time <= above.end_time + 1000, span.name


def test_a_request_that_changes_hands() -> None:
    world = TracedWorld(1, PD, Disaggregated)
    world.submit("r0", [7] * 50, 6)
    finish(world)
    (spans,) = world.traces().values()
    check_places(spans)
    prefilled, decoded = of(spans, "segment")
    assert [dict(span.attributes or {})["cohort.outcome"] for span in (prefilled, decoded)] == [
        "handed_over",
        "finished",
    ]
    chunks = of(spans, "prefill")
    assert [dict(span.attributes or {})["cohort.positions"] for span in chunks] == [32, 18]
    assert all(span.parent is not None and span.parent.span_id == prefilled.context.span_id for span in chunks)
    assert [event.name for event in prefilled.events] == ["first token"]
    (decode,) = of(spans, "decode")
    assert decode.parent is not None and decode.parent.span_id == decoded.context.span_id
    output = len(world.owned["r0"].tokens) - 50
    assert dict(decode.attributes or {})["cohort.positions"] == output - 1
    (sent,), (received,) = of(spans, "send KV"), of(spans, "receive KV")
    for span, peer in ((sent, "decode-0"), (received, "prefill-0")):
        attributes = dict(span.attributes or {})
        assert attributes["cohort.peer"] == peer and attributes["cohort.positions"] == 50
        assert attributes["cohort.blocks"] and span.status.is_ok
    (queue,), (placement,) = of(spans, "queue"), of(spans, "placement")
    assert dict(placement.attributes or {})["cohort.workers"] == "prefill-0,decode-0"
    order = [queue, placement, of(spans, "wait")[0], *chunks, decode]
    assert [span.start_time for span in order] == sorted(span.start_time or 0 for span in order)


@pytest.mark.parametrize(
    ("roles", "placement"), [(UNIFIED, Colocated), (PD_TWICE, Disaggregated), (PD_TWICE, SplitAnywhere)]
)
def test_many_requests(roles: Any, placement: Any) -> None:
    world = TracedWorld(3, roles, placement, blocks=40)  # few blocks: sequences are preempted
    clusters.offer(world, 40, partial(requests, shared=12), over_s=1.0)
    finish(world)
    traces = world.traces()
    assert set(traces) == set(world.owned)
    for spans in traces.values():
        check_places(spans)
        assert len(of(spans, "queue")) == len(of(spans, "placement")) >= 1
        assert names(spans).count("prefill") >= 1 and names(spans).count("wait") <= names(spans).count("segment")
    if placement is not SplitAnywhere:
        events = [event.name for spans in traces.values() for span in spans for event in span.events]
        assert "preempted" in events
    assert [(node.name, len(observer)) for node, observer in world.observers if len(observer)] == []


@pytest.mark.parametrize("seed", range(4))
def test_whatever_breaks_nothing_is_left_open(seed: int) -> None:
    """A worker that dies takes its open spans with it; the manager says that the attempt was lost."""
    world = TracedWorld(seed, PD_TWICE, Disaggregated, loss_rate=0.05, run_failure_rate=0.1, repeat_rate=0.05)
    clusters.offer(world, 30, partial(requests, shared=12), over_s=2.0)
    world.at(0.8, partial(world.cluster.kill, "decode-0"))
    world.at(1.4, lambda: world.cluster.start_worker("decode-0"))
    finish(world)
    alive = [(node.name, len(observer)) for node, observer in world.observers if node.alive and len(observer)]
    assert alive == []
    spans = [span for found in world.traces().values() for span in found]
    assert "attempt lost" in {span.name for span in spans}
    assert any(span.name == "segment" and not span.status.is_ok for span in spans)
