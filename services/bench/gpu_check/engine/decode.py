"""Decode steps of a loaded model against what the device's rates allow: recorded, with everything around, by kernel."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import StepBatch
from cohort.services.bench.gpu_check.engine import profile
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.batches import rows_of
from cohort.services.bench.gpu_check.frame.bounds import decode_s
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.predictions import Facts, expect

WANTED = 1.25
_REPEATS = 30


def classes(check: Check) -> tuple[int, ...]:
    """Numbers of rows that are measured, and recorded."""
    return (1, 16, 64, 256) if check.real else (1, 3)


def context_of(check: Check) -> int:
    return 1024 if check.real else 24


def run(check: Check, runner: ModelRunner, model: str, *, profiled: bool = True) -> None:
    context = context_of(check)
    for rows in classes(check):
        name = f"{model} decode, {rows} rows of {context}"
        check.guard.item(name, partial(_recorded, check, runner, name, rows, context), 10)
        check.guard.item(f"{name}: whole", partial(_whole, check, runner, name, rows, context), 10)
        if profiled:
            call = partial(_profiled, check, runner, name, rows, context)
            check.guard.item(f"{name}: by kernel", call, 15)


def recorded_s(check: Check, runner: ModelRunner, batch: StepBatch) -> float | None:
    """The device's time for the recorded step alone; None where no class takes the batch."""
    steps = runner._device_steps
    runner.execute(batch)
    rows_class = None if steps is None else steps.decode.takes(batch)
    if steps is None or rows_class is None:
        return None
    with torch.inference_mode(), steps.stream.use():
        return rates.seconds(lambda: steps.decode.repeat(rows_class), check.device, repeats=_REPEATS)


def _recorded(check: Check, runner: ModelRunner, name: str, rows: int, context: int) -> None:
    alone_s = recorded_s(check, runner, rows_of(runner, rows, 1, context))
    if alone_s is None:
        check.found.checked(f"{name}: recorded", False, "no recorded class takes it")
        return
    ceilings = check.ceilings()
    least_s = decode_s(runner.geometry, runner.dtype, rows, context, ceilings)
    facts = Facts(ceilings, runner.geometry, runner.dtype, rows=rows, context=context)
    check.found.measured(
        f"{name}: recorded step",
        alone_s / least_s,
        "x the bound",
        at_most=WANTED if check.real else None,
        expect=expect("decode, recorded", facts),
        note=f"{alone_s * 1e3:.3f} ms; bytes and operations take {least_s * 1e3:.3f} ms",
    )


def _whole(check: Check, runner: ModelRunner, name: str, rows: int, context: int) -> None:
    batch = rows_of(runner, rows, 1, context)
    runner.execute(batch)
    times = []
    for _ in range(_REPEATS if check.real else 5):
        started = time.perf_counter()
        runner.execute(batch)
        times.append(time.perf_counter() - started)
    step_s = statistics.median(times)
    facts = Facts(check.ceilings(), runner.geometry, runner.dtype, rows=rows, context=context)
    check.found.measured(
        f"{name}: with inputs, sampling, wait",
        step_s * 1e3,
        "ms",
        expect=expect("decode, whole", facts),
        note=f"{rows / step_s:,.0f} tokens/s",
    )


def _profiled(check: Check, runner: ModelRunner, name: str, rows: int, context: int) -> None:
    batch = rows_of(runner, rows, 1, context)
    profile.by_kernel(check, name, lambda: runner.execute(batch))
