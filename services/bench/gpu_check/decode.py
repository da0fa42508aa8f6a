"""Sections: the decode step of one model shape against what its bytes allow, recorded and with everything around it."""

from __future__ import annotations

import statistics
import time

import torch

from cohort.common.engine.model_runner import ModelRunner, trial_batch
from cohort.services.bench.gpu_check import rates
from cohort.services.bench.gpu_check.context import Check
from cohort.services.bench.gpu_check.shapes import decode_bytes

BANDWIDTH = 4.3e12  # bytes a second; what an H200 copies, read and written
WANTED = 1.25
_REPEATS = 30


def run(check: Check, model: str) -> None:
    shapes = check.shapes()
    if model not in shapes:  # on the processor there is one shape for all
        model = next(iter(shapes))
    runner = check.runner(model, shapes[model])
    started = time.perf_counter()
    runner.warm_up()
    steps = runner._device_steps
    assert steps is not None
    check.found.measured(
        "recording all classes", time.perf_counter() - started, "s", note=f"classes {list(steps.decode.classes)}"
    )
    context = 1024 if check.real else 24
    for rows in (1, 16, 64, 256) if check.real else (1, 3):
        _measure(check, runner, model, rows, context)


def _measure(check: Check, runner: ModelRunner, model: str, rows: int, context: int) -> None:
    batch = trial_batch(rows, 1, context, block_size=runner.block_size, num_blocks=len(runner.kv.blocks))
    steps = runner._device_steps
    if batch is None or steps is None:
        check.found.checked(f"{model} batch {rows}", False, "the cache is too small")
        return
    least_s = decode_bytes(runner.geometry, runner.dtype, rows, context) / BANDWIDTH
    runner.execute(batch)
    whole = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        runner.execute(batch)
        whole.append(time.perf_counter() - started)
    rows_class = steps.decode.takes(batch)
    if rows_class is None:
        check.found.checked(f"{model} batch {rows} recorded", False, "no class takes it")
        return
    with torch.inference_mode(), steps.stream.use():
        alone_s = rates.seconds(lambda: steps.decode.repeat(rows_class), check.device, repeats=_REPEATS)
    check.found.measured(
        f"{model} batch {rows}, context {context}: recorded step",
        alone_s / least_s,
        "x the least",
        at_most=WANTED if check.real else None,
        note=f"{alone_s * 1e3:.2f} ms; the bytes take {least_s * 1e3:.2f} ms",
    )
    step_s = statistics.median(whole)
    check.found.measured(
        f"{model} batch {rows}, context {context}: with inputs, sampling, wait",
        step_s * 1e3,
        "ms",
        note=f"{rows / step_s:,.0f} tokens/s; {(step_s - alone_s) * 1e3:.2f} ms around the recorded step",
    )
