"""Sections: one model, loaded and recorded once, and everything that is measured with it.

    model-8b    decode by kernel, gaps between steps, sampler, mixed steps, prefill
    model-14b   decode, prefill, mixed steps

Only the batch sizes that are measured are recorded; what recording all of them takes is part of the pipeline's start.
"""

from __future__ import annotations

import time

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.device import compiled_kernels
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.services.bench.gpu_check.engine import gaps, steps
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.shapes import shape_folder
from cohort.services.bench.gpu_check.kernels import sampling

_MEASURED_KV = 40 << 30  # 256 rows of 1,024 tokens of an 8B model, and what they grow by


def run_8b(check: Check) -> None:
    model = "Llama-3-8B"
    runner = check.guard.item(f"{model}: load", lambda: _load(check, model, most_kv=_MEASURED_KV), 40)
    if runner is None:
        return
    before = compiled_kernels.compilations()
    steps.decode(check, runner, model)
    gaps.run(check, runner, str(shape_folder(check.folder / model, check.shape(model))))
    sampling.run(check, runner.geometry.vocab_size)
    steps.mixed(check, runner, model)
    steps.prefill(check, runner, model)
    _compiled(check, before)


def run_14b(check: Check) -> None:
    model = "Qwen2.5-14B"
    runner = check.guard.item(f"{model}: load", lambda: _load(check, model), 50)
    if runner is None:
        return
    before = compiled_kernels.compilations()
    steps.decode(check, runner, model, profiled=False)
    steps.mixed(check, runner, model)
    steps.prefill(check, runner, model, profiled=False)
    _compiled(check, before)


def _load(check: Check, model: str, most_kv: int = 0) -> ModelRunner:
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


def _compiled(check: Check, before: int) -> None:
    new = compiled_kernels.compilations() - before
    check.found.measured("kernels compiled after the warm-up", new, "variants", at_most=0)
