"""Sources and arrivals → a workload. Pure and seeded: the same arguments give the same items, on any machine.

Called by the simulator and, for the lengths, by the benchmark. Every aspect has its own random stream, so that changing
one of them leaves the others as they were.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from typing import assert_never

import numpy as np

from cohort.common.errors import ConfigError
from cohort.common.types import TrafficClass
from cohort.common.workloads.arrivals import (
    Arrivals,
    ClosedLoop,
    RandomArrivals,
    TraceTimes,
    describe,
    due_times,
    enough_for,
)
from cohort.common.workloads.items import ClosedLoopPart, WorkItem, Workload, WorkloadFacts
from cohort.common.workloads.lengths import LengthDistribution, Shape, describe_length, draw, draw_shapes
from cohort.common.workloads.traces import Trace, TraceRow


class Stream(IntEnum):
    ARRIVALS = 1
    PROMPT_LENGTHS = 2
    OUTPUT_LENGTHS = 3
    SHAPES = 4
    CLASSES = 5
    SHUFFLE = 6
    MIXTURE = 7


def stream(seed: int, which: Stream) -> np.random.Generator:
    return np.random.default_rng([seed, int(which)])


@dataclass(frozen=True, slots=True)
class Drawn:
    """Lengths drawn independently for prompt and output."""

    prompt: LengthDistribution
    output: LengthDistribution


@dataclass(frozen=True, slots=True)
class Mixed:
    """Lengths drawn as whole shapes, by weight."""

    shapes: tuple[Shape, ...]


@dataclass(frozen=True, slots=True)
class FromTrace:
    """Rows of a trace in their order, or (`resample`) drawn with replacement, so any number of them."""

    trace: Trace
    name: str
    resample: bool = False


Source = Drawn | Mixed | FromTrace


def draw_rows(source: Source, count: int, seed: int) -> list[TraceRow]:
    """Draw the lengths of `count` requests, without arrival times. A trace that is not resampled may have fewer."""
    match source:
        case Drawn(prompt, output):
            prompts = draw(prompt, stream(seed, Stream.PROMPT_LENGTHS), count)
            outputs = draw(output, stream(seed, Stream.OUTPUT_LENGTHS), count)
            return [TraceRow(None, int(p), int(o)) for p, o in zip(prompts, outputs, strict=True)]
        case Mixed(shapes):
            picked = draw_shapes(shapes, stream(seed, Stream.SHAPES), count)
            return [TraceRow(None, shape.prompt_tokens, shape.output_tokens) for shape in picked]
        case FromTrace(trace, _, resample):
            rows = trace.rows
            if resample:
                rows = tuple(rows[int(at)] for at in stream(seed, Stream.SHUFFLE).random(count) * len(rows))
            return [replace(row, arrival_s=None) for row in rows[:count]]
        case _:
            assert_never(source)


def generate(
    name: str,
    source: Source,
    arrivals: Arrivals,
    *,
    count: int | None = None,
    duration_s: float | None = None,
    seed: int = 0,
    traffic_class: TrafficClass = "rt",
    hash_block: int | None = None,
) -> Workload:
    """Generate `count` requests, or as many as arrive within `duration_s`, or a whole trace.

    A closed loop becomes the workload's `closed_loop` part (with `duration_s`: cycled until then). `hash_block`: tokens
    of a hash id, which a trace need not know then. Raises `ConfigError`.
    """
    trace = source.trace if isinstance(source, FromTrace) else None
    rows = draw_rows(source, _count(source, arrivals, count, duration_s), seed)
    block = 0
    if trace is not None and any(row.hash_ids for row in rows):
        block = trace.hash_block() if hash_block is None else hash_block
    facts = WorkloadFacts(
        source=describe_source(source),
        arrivals=describe(arrivals),
        seed=seed,
        skipped_rows=trace.skipped_rows if trace is not None else 0,
    )
    if isinstance(arrivals, TraceTimes):
        if not isinstance(source, FromTrace) or source.trace.arrival_s is None:
            raise ConfigError(f"{name}: trace times need a trace with arrival times; give a rate or a closed loop")
        if source.resample:
            raise ConfigError(f"{name}: drawing tears the trace's lengths from its times; give a rate")
    trace_s = trace.arrival_s[: len(rows)] if trace is not None and trace.arrival_s is not None else None
    due = due_times(arrivals, len(rows), stream(seed, Stream.ARRIVALS), trace_s)

    def item(row: TraceRow, arrival_s: float) -> WorkItem:
        return WorkItem(
            arrival_s,
            row.prompt_tokens,
            row.output_tokens,
            traffic_class,
            hash_ids=row.hash_ids,
            hash_block=block if row.hash_ids else 0,
            session=row.session,
            adapter=row.adapter,
        )

    if isinstance(arrivals, ClosedLoop):
        until_s = float("inf") if duration_s is None else duration_s
        part = ClosedLoopPart(arrivals.concurrency, tuple(item(row, 0.0) for row in rows), until_s=until_s)
        workload = Workload(name, (), facts, (part,))
    else:
        pairs = zip(rows, due or [], strict=True)
        items = tuple(item(row, due_s) for row, due_s in pairs if duration_s is None or due_s < duration_s)
        workload = Workload(name, items, facts)
    workload.check()
    return workload


def _count(source: Source, arrivals: Arrivals, count: int | None, duration_s: float | None) -> int:
    if count is not None:
        return count
    if isinstance(source, FromTrace) and not source.resample:
        return len(source.trace.rows)
    if duration_s is not None and isinstance(arrivals, RandomArrivals):
        return enough_for(arrivals, duration_s)
    raise ConfigError("say how many requests, or (with random arrivals) for how long")


def describe_source(source: Source) -> str:
    match source:
        case Drawn(prompt, output):
            return f"prompt {describe_length(prompt)}, output {describe_length(output)}"
        case Mixed(shapes):
            total = sum(shape.weight for shape in shapes)
            return "mix " + ", ".join(f"{100 * shape.weight / total:.3g} % {shape.label}" for shape in shapes)
        case FromTrace(trace, name, resample):
            return f"trace {name} ({trace.format}{', resampled' if resample else ''})"
        case _:
            assert_never(source)
