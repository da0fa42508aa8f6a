"""Steps of a loaded model against what the device's rates allow: decode rows, a prompt beside them, a long prompt, rows
with drafts, and a head that drafts. By kernel, too: torch's profiler around some repetitions.

Called by `model`, `gaps` and `invariant`. That tokens are right is shown by tests/kernels/gpu.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from cohort.common.config import load_config
from cohort.common.engine.drafts.batch_drafts import FILLED_AT_ONCE, DraftRow
from cohort.common.engine.drafts.states_drafter import StatesDrafter
from cohort.common.engine.drafts.token_chain import TokenChain
from cohort.common.engine.runner.draft_loading import load_draft, plan_draft
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import GREEDY, StepBatch
from cohort.services.bench.gpu_check.frame import batches, rates
from cohort.services.bench.gpu_check.frame.batches import rows_of
from cohort.services.bench.gpu_check.frame.bounds import decode_s
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.shapes import prefill_operations

_WANTED_DECODE, _WANTED_PREFILL = 1.25, 0.65
_REPEATS = 30
_TOP = 15
_TRACE_BYTES = 4 << 20
_DRAFTS = 4  # of a head


def classes(check: Check) -> tuple[int, ...]:
    """Numbers of rows that are measured, and recorded."""
    return (1, 16, 64, 256) if check.real else (1, 3)


def context_of(check: Check) -> int:
    return 1024 if check.real else 24


def recorded_s(check: Check, runner: ModelRunner, batch: StepBatch) -> float | None:
    """The device's time for the recorded step alone; None where no class takes the batch."""
    steps = runner._device_steps
    runner.execute(batch)
    rows_class = None if steps is None else steps.decode.takes(batch)
    if steps is None or rows_class is None:
        return None
    with torch.inference_mode(), steps.stream.use():
        return rates.seconds(lambda: steps.decode.repeat(rows_class), check.device, repeats=_REPEATS)


def whole_s(check: Check, runner: ModelRunner, batch: StepBatch) -> float:
    """With inputs, sampling and the wait: median on the host's clock."""
    runner.execute(batch)
    times = []
    for _ in range(_REPEATS if check.real else 3):
        started = time.perf_counter()
        runner.execute(batch)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def decode(check: Check, runner: ModelRunner, model: str, *, profiled: bool = True) -> None:
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
    least_s = decode_s(runner.geometry, runner.dtype, rows, context, check.ceilings())
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
    batch = batches.mixed(runner, rows, context, prompt)
    check.found.measured(name, whole_s(check, runner, batch) * 1e3, "ms", note=_class_of(runner, batch))


def _class_of(runner: ModelRunner, batch: StepBatch) -> str:
    steps = runner._device_steps
    taken = None if steps is None else steps.mixed.takes(batch)
    return "" if taken is None else f"recorded for {taken.prompt_tokens} prompt tokens beside {taken.rows} rows"


def prefill(check: Check, runner: ModelRunner, model: str, *, profiled: bool = True) -> None:
    tokens = 8192 if check.real else 48
    name = f"{model} prefill, {tokens} tokens"
    check.guard.item(name, partial(_prefill, check, runner, name, tokens), 15)
    if profiled:
        call = partial(_by_kernel, check, runner, name, 1, tokens, tokens, repeats=1)
        check.guard.item(f"{name}: by kernel", call, 15)


def _prefill(check: Check, runner: ModelRunner, name: str, tokens: int) -> None:
    batch = rows_of(runner, 1, tokens, tokens)
    taken_s = rates.seconds(lambda: runner.execute(batch), check.device, repeats=5 if check.real else 2, warm_ups=2)
    rate, matrix = prefill_operations(runner.geometry, tokens) / taken_s, check.ceilings().matrix
    check.found.measured(
        name,
        rate / matrix,
        "of matrix rate",
        at_least=_WANTED_PREFILL if check.real else None,
        note=f"{taken_s * 1e3:.1f} ms, {rate / 1e12:.0f} of {matrix / 1e12:.0f} TFLOP/s",
    )


def drafts(check: Check, runner: ModelRunner, model: str) -> None:
    """Rows of several positions take the path of prompts: the drafts of eight rows are at most 72 positions."""
    for rows in (1, 4, 8) if check.real else (1, 2):
        for count in (2, 8) if check.real else (2,):
            name = f"{model}, {rows} rows with {count} drafts"
            check.guard.item(name, partial(_drafts, check, runner, name, rows, count), 6)


def _drafts(check: Check, runner: ModelRunner, name: str, rows: int, count: int) -> None:
    context = (1024 if check.real else 32) - count  # so that the drafts lie in blocks that the row has anyway
    batch = drafted(runner, rows, context, count)
    plain_s, drafted_s = whole_s(check, runner, rows_of(runner, rows, 1, context)), whole_s(check, runner, batch)
    note = f"{drafted_s * 1e3:.2f} ms and {plain_s * 1e3:.2f} ms; {_class_of(runner, batch) or 'not recorded'}"
    check.found.measured(f"{name}: step", drafted_s / plain_s, "x one without", note=note)


def drafted(runner: ModelRunner, rows: int, context: int, count: int) -> StepBatch:
    """Rows with so many drafts each behind their context, right by chance."""
    batch = rows_of(runner, rows, count + 1, context + count)
    return dataclasses.replace(
        batch, sampling=(GREEDY,) * batch.num_tokens, drafts=np.full(rows, count, dtype=np.int32)
    )


def head(check: Check, runner: ModelRunner, model: str) -> None:
    """A head that drafts from the model's states, with random weights. The last of a section: the model's steps are
    recorded anew, and keep their states from then on."""
    check.guard.item(f"{model}: a head that drafts", partial(_head, check, runner, model), 30)


def _head(check: Check, runner: ModelRunner, model: str) -> None:
    rows, context = (8, 1000) if check.real else (2, 21)  # the drafts lie in blocks that the rows have anyway
    alone = rows_of(runner, 1, 1, context)
    without_s = recorded_s(check, runner, alone)
    drafter = runner.drafter = _drafter(check, runner, model)
    runner.warm_up(classes=classes(check)[:2])
    with_s = recorded_s(check, runner, alone)
    if without_s is not None and with_s is not None:
        note = f"{with_s * 1e3:.3f} ms and {without_s * 1e3:.3f} ms"
        check.found.measured(f"{model} decode, states kept", with_s / without_s, "x one without", note=note)
    batch = batches.with_tokens(rows_of(runner, rows, context, context), runner.geometry.vocab_size)
    batch = dataclasses.replace(batch, numbers=np.arange(1, rows + 1, dtype=np.int64))
    asked = []
    for row, said in enumerate(runner.execute(batch).tokens.tolist()):
        chain = TokenChain("")
        chain.grow([*batch.token_ids[row * context : (row + 1) * context].tolist(), said])
        asked.append(DraftRow(chain, batch.block_tables[row].tolist(), None, (GREEDY,) * _DRAFTS, row + 1))
    for _ in range(rows * context // FILLED_AT_ONCE + rows):  # what the head lacks is computed, so much at a time
        if all(drafter.propose_all(asked).tokens):
            break
    several = [drafter.propose_all(asked).seconds for _ in range(20 if check.real else 3)]
    note = "" if drafter._steps is None else f"recorded for {list(drafter._steps.decode.classes)} rows"
    name = f"{model}, a head's drafts of {rows} rows: one of each"
    check.found.measured(name, statistics.median(several) / _DRAFTS * 1e3, "ms", note=note)


def _drafter(check: Check, runner: ModelRunner, model: str) -> StatesDrafter:
    folder = check.folder / f"{model}-head"
    folder.mkdir(parents=True, exist_ok=True)
    shape = {**check.shape(model), "architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    config = load_config(overrides={"speculation": {"mode": "model", "draft_model": str(folder)}})
    plan = plan_draft(config, folder, runner.geometry, dtype=runner.dtype, device=runner.device, degree=1)
    assert plan is not None
    plan = dataclasses.replace(plan, block_size=runner.block_size, graph_bytes=1 << 30)
    drafter = load_draft(plan, config, runner, "random")
    assert isinstance(drafter, StatesDrafter)
    return drafter


def _by_kernel(
    check: Check, runner: ModelRunner, name: str, rows: int, tokens: int, context: int, repeats: int = 3
) -> None:
    batch = rows_of(runner, rows, tokens, context)
    by_kernel(check, name, lambda: runner.execute(batch), repeats)


def by_kernel(check: Check, name: str, call: Callable[[], object], repeats: int = 3) -> None:
    """Profile `call` and keep the table; on a GPU also the trace. The profiler slows the host down, so nothing else is
    measured within."""
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
    kept = kernels[:_TOP]
    words = f"{total / 1e3:.3f} ms of kernels a call, {sum(kernel['calls'] for kernel in kernels):.0f} launches"
    check.keep_profile(name, words, kept)
    leading = ", ".join(f"{kernel['name'][:40]} {kernel['share']:.0%}" for kernel in kept[:3])
    check.found.said(f"{name}: by kernel", f"{words}; {leading}")
    if real:
        file = check.logs / f"{name.replace(' ', '-').replace(',', '').replace(':', '')}.trace.json.gz"
        with contextlib.suppress(OSError, RuntimeError):
            found.export_chrome_trace(str(file))
            if file.stat().st_size > _TRACE_BYTES:
                file.unlink()


def longest(averages: Any, repeats: int, *, device: bool) -> list[dict[str, Any]]:
    """Per kernel and call: name, launches, microseconds; the longest first."""
    kernels = []
    for event in averages:
        if device and str(getattr(event, "device_type", "")).endswith("CPU"):
            continue
        us = event.self_device_time_total if device else event.self_cpu_time_total
        if us > 0:
            kernels.append({"name": event.key, "calls": event.count / repeats, "us": us / repeats})
    return sorted(kernels, key=lambda kernel: float(kernel["us"]), reverse=True)
