"""Steps of a loaded model against what the device's rates allow: decode rows, a prompt beside them, a long prompt. By
kernel, too: torch's profiler around some repetitions.

Called by `model`, `gaps` and `invariant`. That tokens are right is shown by tests/kernels/gpu.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import GREEDY, StepBatch
from cohort.services.bench.engine.inside.mixed_lengths import decode_batch
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.context import Check, rows_of
from cohort.services.bench.gpu_check.frame.guard import DoesNotFit

_WANTED_DECODE, _WANTED_PREFILL = 1.25, 0.65
_REPEATS = 30
_TOP = 15
_TRACE_BYTES = 4 << 20


def classes(check: Check) -> tuple[int, ...]:
    """Return the numbers of rows that are measured, and recorded."""
    return (1, 16, 64, 256) if check.real else (1, 3)


def context_of(check: Check) -> int:
    return 1024 if check.real else 24


def recorded_s(check: Check, runner: ModelRunner, batch: StepBatch) -> float | None:
    """Return the device's time for the recorded step alone; None where no class takes the batch."""
    steps = runner._device_steps
    runner.execute(batch)
    rows_class = None if steps is None else steps.decode.takes(batch)
    if steps is None or rows_class is None:
        return None
    with torch.inference_mode(), steps.stream.use():
        return rates.seconds(lambda: steps.decode.repeat(rows_class), check.device, repeats=_REPEATS)


def whole_s(check: Check, runner: ModelRunner, batch: StepBatch) -> float:
    """Return the median on the host's clock, with inputs, sampling and the wait."""
    runner.execute(batch)
    times = []
    for _ in range(_REPEATS if check.real else 3):
        started = time.perf_counter()
        runner.execute(batch)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def decode(check: Check, runner: ModelRunner, model: str, *, profiled: bool) -> None:
    context = context_of(check)
    for rows in classes(check):
        name = f"{model} decode, {rows} rows of {context}"
        check.guard.item(name, partial(_recorded, check, runner, name, rows, context), 10)
        check.guard.item(f"{name}: whole", partial(_whole, check, runner, name, rows, context), 10)
        if profiled:
            call = partial(_by_kernel, check, runner, name, rows, 1, context)
            check.guard.item(f"{name}: by kernel", call, 15)


def _recorded(check: Check, runner: ModelRunner, name: str, rows: int, context: int) -> None:
    alone_s = recorded_s(check, runner, rows_of(runner, rows, 1, context))
    if alone_s is None:
        check.found.checked(f"{name}: recorded", False, "no recorded class takes it")
        return
    least_s = rates.decode_s(runner.geometry, runner.dtype, rows, context, check.ceilings())
    check.found.measured(
        f"{name}: recorded step",
        alone_s / least_s,
        "x the bound",
        at_most=_WANTED_DECODE if check.real else None,
        note=f"{alone_s * 1e3:.3f} ms; bytes and operations take {least_s * 1e3:.3f} ms",
    )


def _whole(check: Check, runner: ModelRunner, name: str, rows: int, context: int) -> None:
    step_s = whole_s(check, runner, rows_of(runner, rows, 1, context))
    check.found.measured(
        f"{name}: with inputs, sampling, wait", step_s * 1e3, "ms", note=f"{rows / step_s:,.0f} tokens/s"
    )


def mixed(check: Check, runner: ModelRunner, model: str) -> None:
    rows, context = (64, 1024) if check.real else (3, 24)
    for prompt in (16, 128, 512) if check.real else (5,):
        name = f"{model}, {rows} decode rows of {context} beside {prompt} prompt tokens"
        check.guard.item(name, partial(_mixed, check, runner, name, rows, context, prompt), 8)


def _mixed(check: Check, runner: ModelRunner, name: str, rows: int, context: int, prompt: int) -> None:
    """Measure a prompt of `prompt` tokens and `rows` decode rows of this context in one step."""
    contexts, num_blocks = [prompt, *[context] * rows], len(runner.kv.blocks)
    queries = [prompt, *[1] * rows]
    batch = decode_batch(contexts, block_size=runner.block_size, num_blocks=num_blocks, queries=queries)
    if batch is None or rows + 1 > runner.max_rows:
        raise DoesNotFit(f"{rows + 1} rows of {runner.max_rows} in a cache of {num_blocks} blocks")
    check.found.measured(name, whole_s(check, runner, batch) * 1e3, "ms", note=_class_of(runner, batch))


def _class_of(runner: ModelRunner, batch: StepBatch) -> str:
    steps = runner._device_steps
    taken = None if steps is None else steps.mixed.takes(batch)
    return "" if taken is None else f"recorded for {taken.prompt_tokens} prompt tokens beside {taken.rows} rows"


def prefill(check: Check, runner: ModelRunner, model: str, *, profiled: bool) -> None:
    tokens = 8192 if check.real else 48
    name = f"{model} prefill, {tokens} tokens"
    check.guard.item(name, partial(_prefill, check, runner, name, tokens), 15)
    if profiled:
        call = partial(_by_kernel, check, runner, name, 1, tokens, tokens, repeats=1)
        check.guard.item(f"{name}: by kernel", call, 15)


def _prefill(check: Check, runner: ModelRunner, name: str, tokens: int) -> None:
    batch = rows_of(runner, 1, tokens, tokens)
    taken_s = rates.seconds(lambda: runner.execute(batch), check.device, repeats=5 if check.real else 2, warm_ups=2)
    rate, matrix = rates.prefill_operations(runner.geometry, tokens) / taken_s, check.ceilings().matrix
    check.found.measured(
        name,
        rate / matrix,
        "of matrix rate",
        at_least=_WANTED_PREFILL if check.real else None,
        note=f"{taken_s * 1e3:.1f} ms, {rate / 1e12:.0f} of {matrix / 1e12:.0f} TFLOP/s",
    )


def drafted(runner: ModelRunner, rows: int, context: int, count: int) -> StepBatch:
    """Return rows with `drafts` drafts each after their context, right by chance."""
    batch = rows_of(runner, rows, count + 1, context + count)
    return dataclasses.replace(
        batch, sampling=(GREEDY,) * batch.num_tokens, drafts=np.full(rows, count, dtype=np.int32)
    )


def _by_kernel(
    check: Check, runner: ModelRunner, name: str, rows: int, tokens: int, context: int, repeats: int = 3
) -> None:
    """Profile a step and keep the table; on a GPU also the trace. The profiler slows the host down, so nothing else is
    measured within."""
    call = partial(runner.execute, rows_of(runner, rows, tokens, context))
    call()
    real = check.device.type == "cuda"
    if real:
        torch.cuda.synchronize(check.device)
    activities = [ProfilerActivity.CUDA, ProfilerActivity.CPU] if real else [ProfilerActivity.CPU]
    with profile(activities=activities) as found:
        for _ in range(repeats):
            call()
        if real:
            torch.cuda.synchronize(check.device)
    kernels = longest(found.key_averages(), repeats, device=real)
    total = sum(kernel["us"] for kernel in kernels)
    for kernel in kernels:
        kernel["share"] = kernel["us"] / total if total else 0.0
    top = kernels[:_TOP]
    note = f"{total / 1e3:.3f} ms of kernels a call, {sum(kernel['calls'] for kernel in kernels):.0f} launches"
    slug = name.replace(" ", "-").replace(",", "").replace(":", "")
    (check.logs / f"{slug}.kernels.json").write_text(json.dumps({"name": name, "note": note, "kernels": top}))
    leading = ", ".join(f"{kernel['name'][:40]} {kernel['share']:.0%}" for kernel in top[:3])
    check.found.add_note(f"{name}: by kernel", f"{note}; {leading}")
    if real:
        file = check.logs / f"{slug}.trace.json.gz"
        with contextlib.suppress(OSError, RuntimeError):
            found.export_chrome_trace(str(file))
            if file.stat().st_size > _TRACE_BYTES:
                file.unlink()


def longest(averages: Any, repeats: int, *, device: bool) -> list[dict[str, Any]]:
    """Return name, launches and microseconds per kernel and call; the longest first."""
    kernels = []
    for event in averages:
        if device and str(getattr(event, "device_type", "")).endswith("CPU"):
            continue
        us = event.self_device_time_total if device else event.self_cpu_time_total
        if us > 0:
            kernels.append({"name": event.key, "calls": event.count / repeats, "us": us / repeats})
    return sorted(kernels, key=lambda kernel: float(kernel["us"]), reverse=True)
