"""Whole models with the kernels of a GPU: log-probabilities have the same bits however the steps were cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.forward.device_steps import DeviceSteps
from cohort.common.engine.models import lean_gpt_oss, lean_llama
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import SamplingRow, TokenLogprobs
from cohort.common.engine.weights import linear
from cohort.kernels import batch_invariance
from cohort.kernels.cpu import native
from cohort.kernels.gpu import available, operators
from tests.common.engine.driver import Driver, make_runner, random_prompts
from tests.engine_models import model_folder as model_folder
from tests.examples import another_of_its_kind
from tests.kernels.gpu.conftest import DEVICE

LENGTH = 13


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cuda":
        return
    monkeypatch.setattr(native, "ops_for", lambda tensor: None)
    monkeypatch.setattr(linear, "linear_form", lambda *shape: "fixed" if batch_invariance.in_force() else "plain")
    monkeypatch.setattr(available, "ops_for", lambda tensor: operators)
    monkeypatch.setattr(DeviceSteps, "compile", lambda steps, threads: None)  # it would be run, on meaningless memory
    for form in (lean_llama, lean_gpt_oss):
        monkeypatch.setattr(form, "groups_on_host", lambda device: False)


def computed(runner: ModelRunner, counts: Sequence[int], companion: int) -> TokenLogprobs | None:
    """The log-probabilities behind a prompt that is computed in these steps, beside another that has so many tokens in
    each."""
    driver = Driver(runner, shuffle=sum(counts))
    for name, prompt in zip("ab", random_prompts([LENGTH, 17]), strict=True):
        driver.add(name, prompt)
    driver.requests["a"].sampling = SamplingRow(seed=3, position=LENGTH, temperature=0.8, logprobs=4)
    for count in counts:
        beside = [("b", min(companion, driver.remaining("b")))] if companion and driver.remaining("b") else []
        plan = sorted([("a", count), *beside], key=lambda entry: entry[1] == 1)
        sampled = [name for name, number in plan if number == driver.remaining(name)]
        output = driver.step(plan)
    return output.logprobs[sampled.index("a")]


@another_of_its_kind()
@pytest.mark.parametrize("name", ["qwen3", "mixtral", "gpt-oss", "gemma2"])
def test_every_cut_computes_the_same(model_folder, name):
    runner = make_runner(
        model_folder(name),
        device=DEVICE.type,
        device_steps=True,
        max_rows=2,
        max_step_tokens=32,
        num_blocks=24,
        share=DeviceShare(graphs=1 << 40),
        batch_invariant=True,
    )
    whole = computed(runner, [LENGTH], 0)
    assert whole is not None
    for counts, companion in (([8, 4, 1], 0), ([LENGTH - 3, 3], 5), ([LENGTH - 2, 1, 1], 17)):
        assert computed(runner, counts, companion) == whole
    runner.warm_up(classes=(1, 2))  # recorded from here on
    assert computed(runner, [LENGTH - 2, 1, 1], 1) == whole
