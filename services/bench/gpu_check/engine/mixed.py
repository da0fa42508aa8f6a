"""Steps of decode rows with a prompt beside them, recorded where a class holds them: host time and device time."""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from functools import partial

from cohort.common.engine.forward import device_steps
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.services.bench.gpu_check.frame import batches
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.predictions import Facts, expect
from cohort.services.bench.gpu_check.frame.spans import Place, spanned


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
    steps = runner._device_steps
    taken = None if steps is None else steps.mixed.takes(batch)
    facts = Facts(check.ceilings(), runner.geometry, runner.dtype, rows=rows, context=context, tokens=prompt)
    expected = expect("mixed", facts)
    if taken is not None:
        expected = expect("mixed, recorded", replace(facts, rows=taken.rows, tokens=taken.prompt_tokens))
        host = f"{host}{'; ' * bool(host)}recorded for {taken.prompt_tokens} prompt tokens beside {taken.rows} rows"
    check.found.measured(name, statistics.median(times) * 1e3, "ms", expect=expected, note=host)
