"""Presets that pad their prompts run recorded steps like all others: mixed ones with their padding, decodes without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cohort.common.config import load_config
from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import StepBatch
from cohort.common.policies import compose
from cohort.common.policies.interface import IterationScheduler
from tests.common.engine.driver import VOCAB, make_runner
from tests.common.engine.forward.test_padded_path import generate

PADDED = {"bucketserve": {"policies": {"iteration": "padded_prefill"}}, "baseline-uellm": {}}


def scheduler(preset: str) -> IterationScheduler:
    limits = {"max_rows": 5, "max_step_tokens": 256, "prefill_chunk": 48}
    return compose.iteration(load_config(preset=preset, overrides={"engine": limits, **PADDED[preset]}))


def run(runner: ModelRunner, preset: str) -> tuple[list[list[int]], int]:
    random = Random(3)
    prompts = [[random.randrange(VOCAB) for _ in range(random.randint(2, 30))] for _ in range(9)]
    return generate(runner, scheduler(preset), prompts)


@pytest.mark.parametrize("preset", PADDED)
def test_every_step_is_recorded_and_the_tokens_are_those_of_unrecorded_steps(
    preset: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder("llama")
    ordinary, padding = run(make_runner(folder), preset)
    assert padding > 0
    runner = make_runner(folder, device_steps=True, share=DeviceShare(graphs=1 << 40))
    runner.warm_up()
    steps: Any = runner._device_steps
    launch, launched = steps.launch, {"decode": 0, "mixed": 0, "neither": 0}

    def counted(batch: StepBatch, *others: Any) -> Any:
        decode, mixed = steps.decode.takes(batch) is not None, steps.mixed.takes(batch) is not None
        launched["decode" if decode else "mixed" if mixed else "neither"] += 1
        assert decode == (batch.num_tokens == batch.num_rows)
        return launch(batch, *others)

    monkeypatch.setattr(steps, "launch", counted)
    assert run(runner, preset) == (ordinary, padding)
    assert launched["decode"] >= 3 and launched["mixed"] >= 2 and launched["neither"] == 0
