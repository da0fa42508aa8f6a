"""Steps of decode rows with a prompt beside them, recorded where a class holds them: host time and device time."""

from __future__ import annotations

import statistics
import time
from functools import partial

from cohort.common.engine import device_steps
from cohort.common.engine.model_runner import ModelRunner
from cohort.services.bench.gpu_check import batches
from cohort.services.bench.gpu_check.context import Check
from cohort.services.bench.gpu_check.predictions import Facts, expect
from cohort.services.bench.gpu_check.spans import Place, spanned


def run(check: Check, runner: ModelRunner, model: str) -> None:
    rows, context = (64, 1024) if check.real else (3, 24)
    for prompt in (16, 128, 512) if check.real else (5,):
        name = f"{model}, {rows} decode rows of {context} beside {prompt} prompt tokens"
        check.guard.item(name, partial(_measure, check, runner, name, rows, context, prompt), 8)


def _measure(check: Check, runner: ModelRunner, name: str, rows: int, context: int, prompt: int) -> None:
    batch = batches.mixed(runner, rows, context, prompt)
    for _ in range(2):
        runner.execute(batch)
    times = []
    with spanned([Place(device_steps.DeviceSteps, "launch", "launch")]) as spans:
        for _ in range(12 if check.real else 3):
            started = time.perf_counter()
            runner.execute(batch)
            times.append(time.perf_counter() - started)
    launches = spans.lengths("launch")
    host = f"the host launches for {statistics.median(launches) * 1e3:.2f} ms of it" if launches else ""
    facts = Facts(check.ceilings(), runner.geometry, runner.dtype, rows=rows, context=context, tokens=prompt)
    check.found.measured(name, statistics.median(times) * 1e3, "ms", expect=expect("mixed", facts), note=host)
