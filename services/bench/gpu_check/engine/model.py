"""Sections: one model, loaded and recorded once, and everything that is measured with it.

    model-8b          decode by kernel, gaps between steps, sampler, mixed steps, prefill
    model-14b         decode, prefill, mixed steps
    batch-invariant   what `engine.batch_invariant` costs (ADR 14): the same steps without the option and with it; that
                      its bits are the same in every cut is shown by tests/kernels/gpu

Only the batch sizes that are measured are recorded; what recording all of them takes is part of the pipeline's start.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial

import torch

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.device import compiled_kernels
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.services.bench.gpu_check.engine import gaps, steps
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.context import Check, rows_of, shape_folder
from cohort.services.bench.gpu_check.kernels import sampling

_COMPARED = "Llama-3-8B"
_COMPARED_KV = 12 << 30  # 64 rows of 1,024 tokens of an 8B model, and what they grow by
_MEASURED_KV = 40 << 30  # 256 rows of 1,024 tokens of an 8B model, and what they grow by


def run_8b(check: Check) -> None:
    _run(check, "Llama-3-8B", 40, most_kv=_MEASURED_KV, small=True)


def run_14b(check: Check) -> None:
    _run(check, "Qwen2.5-14B", 50)


def _run(check: Check, model: str, seconds: float, *, most_kv: int = 0, small: bool = False) -> None:
    """Measure a model; `seconds`: to load it. The `small` one also runs what a larger one would only repeat."""
    runner = check.guard.item(f"{model}: load", lambda: _load(check, model, most_kv), seconds)
    if runner is None:
        return
    before = compiled_kernels.compilations()
    steps.decode(check, runner, model, profiled=small)
    if small:
        gaps.run(check, runner, str(shape_folder(check.folder / model, check.shape(model))))
        sampling.run(check, runner.geometry.vocab_size)
    steps.mixed(check, runner, model)
    steps.prefill(check, runner, model, profiled=small)
    new = compiled_kernels.compilations() - before
    check.found.measured("kernels compiled after the warm-up", new, "variants", at_most=0)


def _load(check: Check, model: str, most_kv: int) -> ModelRunner:
    check.ceilings()  # before the model takes the memory
    started = time.perf_counter()
    share = DeviceShare(graphs=2 << 30, most_kv=most_kv)
    runner = check.runner(model, check.shape(model), share=share)
    loaded = time.perf_counter()
    runner.warm_up(classes=steps.classes(check))
    ended = time.perf_counter()
    recorded = () if runner._device_steps is None else runner._device_steps.decode.classes
    check.found.measured(
        f"{model}: load and record",
        ended - started,
        "s",
        note=f"{ended - loaded:.1f} s for classes {list(recorded)}; {len(runner.kv.blocks)} blocks",
    )
    wanted = steps.classes(check)
    check.found.checked(f"{model}: classes recorded", set(wanted) <= set(recorded), f"{list(recorded)} of {wanted}")
    return runner


def run_invariant(check: Check) -> None:
    plain: dict[str, float] = {}
    for invariant in (False, True):
        name = f"{_COMPARED}, batch_invariant {str(invariant).lower()}"
        runner = check.guard.item(f"{name}: load", partial(_load_as, check, invariant), 30)
        if runner is None:
            return
        for step, tokens, seconds in _steps(check, runner):
            check.guard.item(f"{name}: {step}", partial(_compare, check, step, tokens, seconds, plain, invariant), 10)
        del runner, seconds
        gc.collect()
        if check.device.type == "cuda":
            torch.cuda.empty_cache()


def _rows(check: Check) -> tuple[int, ...]:
    return (1, 16, 64) if check.real else (1, 3)


def _load_as(check: Check, invariant: bool) -> ModelRunner:
    share = DeviceShare(graphs=2 << 30, most_kv=_COMPARED_KV)
    runner = check.runner(_COMPARED, check.shape(_COMPARED), share=share, batch_invariant=invariant)
    runner.warm_up(classes=_rows(check))
    return runner


def _steps(check: Check, runner: ModelRunner) -> list[tuple[str, int, Callable[[], float | None]]]:
    """Return the name of each timed step, the tokens that it yields or computes, and its seconds."""
    context, (rows, positions) = steps.context_of(check), (16, 5) if check.real else (2, 3)
    tokens = 2048 if check.real else 48
    drafted = steps.drafted(runner, rows, context - positions, positions - 1)
    execute = partial(runner.execute, rows_of(runner, 1, tokens, tokens))
    prompt = partial(rates.seconds, execute, check.device, repeats=5 if check.real else 2, warm_ups=2)

    def decode(count: int) -> Callable[[], float | None]:
        return partial(steps.recorded_s, check, runner, rows_of(runner, count, 1, context))

    return [
        *((f"decode, {count} rows of {context}", count, decode(count)) for count in _rows(check)),
        (f"{rows} rows of {positions} positions", rows * positions, partial(steps.whole_s, check, runner, drafted)),
        (f"a prompt of {tokens}", tokens, prompt),
    ]


def _compare(
    check: Check, step: str, tokens: int, seconds: Callable[[], float | None], plain: dict[str, float], invariant: bool
) -> None:
    taken_s = seconds()
    if taken_s is None:
        check.found.checked(f"{step}: recorded", False, "no recorded class takes it")
    elif not invariant:
        plain[step] = taken_s
    elif step in plain:
        check.found.measured(
            f"{step}: with the option",
            taken_s / plain[step],
            "x without",
            note=f"{taken_s * 1e3:.3f} ms and {plain[step] * 1e3:.3f} ms; {tokens / taken_s:,.0f} and "
            f"{tokens / plain[step]:,.0f} positions/s",
        )
