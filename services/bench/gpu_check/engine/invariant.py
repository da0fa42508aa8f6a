"""Section: what `engine.batch_invariant` costs (ADR 14): one model is loaded twice, without the option and with it, and
the same steps are timed. That its bits are the same in every cut is shown by tests/kernels/gpu.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial

import torch

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.services.bench.gpu_check.engine import steps
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.context import Check, rows_of

_MODEL = "Llama-3-8B"
_MEASURED_KV = 12 << 30  # 64 rows of 1,024 tokens of an 8B model, and what they grow by


def run(check: Check) -> None:
    plain: dict[str, float] = {}
    for invariant in (False, True):
        name = f"{_MODEL}, batch_invariant {str(invariant).lower()}"
        runner = check.guard.item(f"{name}: load", partial(_load, check, invariant), 30)
        if runner is None:
            return
        for step, tokens, seconds in _steps(check, runner):
            check.guard.item(f"{name}: {step}", partial(_measure, check, step, tokens, seconds, plain, invariant), 10)
        del runner, seconds
        gc.collect()
        if check.device.type == "cuda":
            torch.cuda.empty_cache()


def _rows(check: Check) -> tuple[int, ...]:
    return (1, 16, 64) if check.real else (1, 3)


def _load(check: Check, invariant: bool) -> ModelRunner:
    share = DeviceShare(graphs=2 << 30, most_kv=_MEASURED_KV)
    runner = check.runner(_MODEL, check.shape(_MODEL), share=share, batch_invariant=invariant)
    runner.warm_up(classes=_rows(check))
    return runner


def _steps(check: Check, runner: ModelRunner) -> list[tuple[str, int, Callable[[], float | None]]]:
    """Of each step that is timed its name, the tokens that it yields or computes, and its seconds."""
    context, found = steps.context_of(check), list[tuple[str, int, Callable[[], float | None]]]()
    for rows in _rows(check):
        call = partial(steps.recorded_s, check, runner, rows_of(runner, rows, 1, context))
        found.append((f"decode, {rows} rows of {context}", rows, call))
    rows, positions = (16, 5) if check.real else (2, 3)
    drafted = steps.drafted(runner, rows, context - positions, positions - 1)
    found.append(
        (f"{rows} rows of {positions} positions", rows * positions, lambda: steps.whole_s(check, runner, drafted))
    )
    tokens = 2048 if check.real else 48
    prompt = rows_of(runner, 1, tokens, tokens)
    repeats = 5 if check.real else 2
    found.append(
        (
            f"a prompt of {tokens}",
            tokens,
            lambda: rates.seconds(lambda: runner.execute(prompt), check.device, repeats=repeats, warm_ups=2),
        )
    )
    return found


def _measure(
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
