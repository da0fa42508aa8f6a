"""Section: prefill of one long prompt against the device's matrix rate."""

from __future__ import annotations

import torch

from cohort.common.engine.device_memory import DeviceShare
from cohort.common.engine.model_runner import trial_batch
from cohort.services.bench.gpu_check import rates
from cohort.services.bench.gpu_check.context import Check
from cohort.services.bench.gpu_check.shapes import prefill_operations

WANTED = 0.6


def run(check: Check) -> None:
    tokens, side = (8192, 8192) if check.real else (48, 128)
    matrix = rates.matrix_operations_per_s(check.device, side, check.dtype)
    for model, config in check.shapes().items():
        runner = check.runner(
            model, config, max_step_tokens=tokens, max_rows=8, share=DeviceShare(fraction=0.5), max_context=tokens
        )
        batch = trial_batch(1, tokens, tokens, block_size=runner.block_size, num_blocks=len(runner.kv.blocks))
        assert batch is not None
        taken = rates.seconds(lambda runner=runner, batch=batch: runner.execute(batch), check.device, repeats=5)  # type: ignore[misc]
        rate = prefill_operations(runner.geometry, tokens) / taken
        check.found.measured(
            f"{model} {tokens} tokens",
            rate / matrix,
            "of matrix rate",
            at_least=WANTED if check.real else None,
            note=f"{taken * 1e3:.1f} ms, {rate / 1e12:.0f} of {matrix / 1e12:.0f} TFLOP/s",
        )
        del runner, batch
        if check.real:
            torch.cuda.empty_cache()
