"""Which memory torch allocates during one step, and by which operator: the profiler's record of one `execute`.

Used by `cohort bench engine`. Counts what torch's CPU allocator hands out, inside operators too; memory that
operators take by themselves (a library's scratch space) and NumPy's arrays pass it by.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.trial_batch import trial_batch
from cohort.services.bench.engine.report import Allocation, Allocations

_NO_OPERATOR = "outside operators"


def decode_allocations(runner: ModelRunner, rows: int, context: int) -> Allocations | None:
    """Of one decode step, after a first one; None where the cache cannot hold it."""
    batch = trial_batch(rows, 1, context, block_size=runner.block_size, num_blocks=len(runner.kv.blocks))
    if batch is None:
        return None
    runner.execute(batch)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        runner.execute(batch)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    count, sizes = allocations_in(events)
    by_operator = [
        Allocation(operator=operator, count=count[operator], total_bytes=sizes[operator])
        for operator, _ in count.most_common()
    ]
    return Allocations(
        rows=rows, context=context, count=count.total(), total_bytes=sizes.total(), by_operator=by_operator
    )


def allocations_in(events: list[dict[str, Any]]) -> tuple[Counter[str], Counter[str]]:
    """Allocations and their bytes by the innermost operator around each, from a Chrome trace's events."""
    operators = [event for event in events if event.get("ph") == "X" and event.get("cat") == "cpu_op"]
    count: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for event in events:
        if event.get("name") != "[memory]" or event["args"]["Bytes"] <= 0:
            continue
        around = [
            operator
            for operator in operators
            if operator["tid"] == event["tid"] and operator["ts"] <= event["ts"] <= operator["ts"] + operator["dur"]
        ]
        name = min(around, key=lambda operator: operator["dur"])["name"] if around else _NO_OPERATOR
        count[name] += 1
        sizes[name] += event["args"]["Bytes"]
    return count, sizes


def profiler_available() -> bool:
    return bool(torch.profiler.kineto_available())
