"""Sections: one model, loaded and recorded once, and everything that is measured with it.

    model-8b    decode by kernel, gaps between steps, sampler, mixed steps, rows with drafts, prefill, a head
    model-14b   decode, prefill, mixed steps, the cache filled

Only the batch sizes that are measured are recorded; what recording all of them takes is part of the pipeline's start.
"""

from __future__ import annotations

import time

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.services.bench.gpu_check.engine import decode, drafts, fill, gaps, heads, mixed, prefill
from cohort.services.bench.gpu_check.engine.compilations import Compilations, counted
from cohort.services.bench.gpu_check.frame.context import Check
from cohort.services.bench.gpu_check.frame.predictions import Facts, expect
from cohort.services.bench.gpu_check.frame.shapes import shape_folder
from cohort.services.bench.gpu_check.kernels import sampling

_MEASURED_KV = 40 << 30  # 256 rows of 1,024 tokens of an 8B model, and what they grow by


def run_8b(check: Check) -> None:
    model = "Llama-3-8B"
    runner = check.guard.item(f"{model}: load", lambda: _load(check, model, most_kv=_MEASURED_KV), 40)
    if runner is None:
        return
    with counted() as compilations:
        decode.run(check, runner, model)
        gaps.run(check, runner, _folder(check, model))
        sampling.run(check, runner.geometry)
        mixed.run(check, runner, model)
        drafts.run(check, runner, model)
        prefill.run(check, runner, model)
    _compiled(check, compilations)
    heads.run(check, runner, model)


def run_14b(check: Check) -> None:
    model = "Qwen2.5-14B"
    runner = check.guard.item(f"{model}: load", lambda: _load(check, model), 50)
    if runner is None:
        return
    with counted() as compilations:
        decode.run(check, runner, model, profiled=False)
        mixed.run(check, runner, model)
        prefill.run(check, runner, model, profiled=False)
        fill.run(check, runner, _folder(check, model), 60)
    _compiled(check, compilations)


def _folder(check: Check, model: str) -> str:
    return str(shape_folder(check.folder / model, check.shape(model)))


def _load(check: Check, model: str, most_kv: int = 0) -> ModelRunner:
    check.ceilings()  # before the model takes the memory
    started = time.perf_counter()
    share = DeviceShare(graphs=2 << 30, most_kv=most_kv)
    runner = check.runner(model, check.shape(model), share=share)
    loaded = time.perf_counter()
    runner.warm_up(classes=decode.classes(check))
    ended = time.perf_counter()
    steps = runner._device_steps
    recorded = () if steps is None else steps.decode.classes
    check.found.measured(
        f"{model}: load and record",
        ended - started,
        "s",
        note=f"{ended - loaded:.1f} s for classes {list(recorded)}; {len(runner.kv.blocks)} blocks",
    )
    wanted = decode.classes(check)
    check.found.checked(f"{model}: classes recorded", set(wanted) <= set(recorded), f"{list(recorded)} of {wanted}")
    return runner


def _compiled(check: Check, compilations: Compilations) -> None:
    if not compilations.countable:
        check.found.said("kernels compiled after the warm-up", "this Triton does not tell")
        return
    check.found.measured(
        "kernels compiled after the warm-up",
        len(compilations.names),
        "variants",
        at_most=0,
        expect=expect("compilations", Facts(check.ceilings())),
        note=compilations.words(),
    )
