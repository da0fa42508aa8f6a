"""The states the predictor learns from are those the sampled tokens came from, and come once per request."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from cohort.common.engine.step.batch_builder import BatchBuilder
from cohort.common.engine.worker.worker_loop import prompt_states
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.interface import IterationPlan
from cohort.common.sequence import Row, Sequence
from cohort.common.types import Attempt, KvGeometry, Request, SamplingParams
from tests.common.engine.driver import BLOCK_SIZE, Driver, make_runner

PROMPTS = ([3, 1, 4, 1, 5, 9, 2, 6], [27, 18, 28, 18])


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_states_are_those_the_vocabulary_was_multiplied_with(model_folder: Callable[[str], Path], family: str) -> None:
    folder = model_folder(family)
    runner = make_runner(folder)
    driver = Driver(runner)
    for index, prompt in enumerate(PROMPTS):
        driver.add(f"r{index}", prompt)
    driver.step([("r0", 8), ("r1", 4)])
    states = runner.sampled_states(2)
    assert states is not None
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt, state in zip(PROMPTS, states, strict=True):
        with torch.inference_mode():
            hidden = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0, -1]
        np.testing.assert_allclose(state.astype(np.float32), hidden.numpy(), rtol=5e-3, atol=5e-3)
    assert runner.sampled_states(3) is None  # the step had two


def test_one_message_per_first_token_only(model_folder: Callable[[str], Path]) -> None:
    runner = make_runner(model_folder("llama"))
    kv = PagedAllocator(KvGeometry(1, 1, 1, 1, BLOCK_SIZE), 20, 0)

    def sequence(name: str, known: int) -> Sequence:
        tokens = list(range(known))
        return Sequence(
            Request(Attempt(name, 2), "g", tokens, 4, SamplingParams(max_tokens=9), 0.0), list(tokens), None, 0, 0.0
        )

    first, recovered = sequence("new", 4), sequence("recovered", 6)  # two output tokens were known on arrival
    for each in (first, recovered):
        kv.admit(each)
    batch, sampled = BatchBuilder(kv).build(IterationPlan(rows=[Row(first, 0, 4), Row(recovered, 0, 6)]))
    for each, token in zip(sampled, runner.execute(batch).tokens.tolist(), strict=True):
        each.computed = each.known
        each.tokens.append(token)
    (message,) = prompt_states(runner, sampled)
    assert message.attempt == Attempt("new", 2)
    assert len(message.hidden) == 2 * 48
    assert kv.extend(first, 5)
    batch, sampled = BatchBuilder(kv).build(IterationPlan(rows=[Row(first, 4, 1)]))
    first.tokens.append(int(runner.execute(batch).tokens[0]))
    assert prompt_states(runner, sampled) == []


def test_models_without_states_send_none(model_folder: Callable[[str], Path]) -> None:
    runner = make_runner(model_folder("gpt2"))
    driver = Driver(runner)
    driver.add("r", PROMPTS[0])
    driver.step([("r", 8)])
    assert runner.sampled_states(1) is None
