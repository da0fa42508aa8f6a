"""A request computes the same whatever shares its steps: sampled tokens and log-probabilities, to the last bit.

Holds for the lean models on the CPU in float32, whose matrix products give a row the same bits in every batch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import SamplingRow, TokenLogprobs
from tests.common.engine.driver import Driver, make_runner, random_prompts

OUTPUTS = 12


@pytest.fixture(scope="module", params=["llama", "qwen3", "opt", "mixtral", "qwen3-moe", "qwen2-moe"])
def runner(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> ModelRunner:
    return make_runner(model_folder(request.param))


def _run(runner: ModelRunner, companions: int, shuffle: int) -> tuple[list[int], list[TokenLogprobs | None]]:
    """The first request's tokens and log-probabilities beside some others."""
    driver = Driver(runner, shuffle=shuffle)
    prompts = random_prompts([21, 4, 37, 9, 30, 17])
    for index in range(1 + companions):
        driver.add(str(index), prompts[index])
    logprobs = []
    for step in range(OUTPUTS):
        position = len(driver.requests["0"].tokens)
        driver.requests["0"].sampling = SamplingRow(seed=7, position=position, temperature=0.9, top_p=0.95, logprobs=4)
        present = ["0"] + [str(index) for index in range(1, 1 + companions) if (step + index) % 3]
        plan = [(name, driver.remaining(name)) for name in present]
        output = driver.step(plan)
        order = [name for name, _ in sorted(plan, key=lambda entry: entry[1] == 1)]
        logprobs.append(output.logprobs[order.index("0")])
    return driver.requests["0"].tokens, logprobs


def test_companions_change_nothing(runner: ModelRunner) -> None:
    alone = _run(runner, companions=0, shuffle=1)
    assert _run(runner, companions=2, shuffle=2) == alone
    assert _run(runner, companions=5, shuffle=3) == alone
