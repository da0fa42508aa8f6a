"""A long prompt through a loaded model against the device's matrix rate, whole and by kernel."""

from __future__ import annotations

from functools import partial

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.services.bench.gpu_check.engine import profile
from cohort.services.bench.gpu_check.frame import rates
from cohort.services.bench.gpu_check.frame.batches import rows_of
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.predictions import Facts, expect
from cohort.services.bench.gpu_check.frame.shapes import prefill_operations

WANTED = 0.65


def run(check: Check, runner: ModelRunner, model: str, *, profiled: bool = True) -> None:
    tokens = 8192 if check.real else 48
    name = f"{model} prefill, {tokens} tokens"
    check.guard.item(name, partial(_measure, check, runner, name, tokens), 15)
    if profiled:
        check.guard.item(f"{name}: by kernel", partial(_profiled, check, runner, name, tokens), 15)


def _measure(check: Check, runner: ModelRunner, name: str, tokens: int) -> None:
    batch = rows_of(runner, 1, tokens, tokens)
    taken_s = rates.seconds(lambda: runner.execute(batch), check.device, repeats=5 if check.real else 2, warm_ups=2)
    ceilings = check.ceilings()
    rate = prefill_operations(runner.geometry, tokens) / taken_s
    check.found.measured(
        name,
        rate / ceilings.matrix,
        "of matrix rate",
        at_least=WANTED if check.real else None,
        expect=expect("prefill", Facts(ceilings, runner.geometry, runner.dtype, tokens=tokens)),
        note=f"{taken_s * 1e3:.1f} ms, {rate / 1e12:.0f} of {ceilings.matrix / 1e12:.0f} TFLOP/s",
    )


def _profiled(check: Check, runner: ModelRunner, name: str, tokens: int) -> None:
    batch = rows_of(runner, 1, tokens, tokens)
    profile.by_kernel(check, name, lambda: runner.execute(batch), repeats=1)
