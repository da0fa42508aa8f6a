"""Steps as a GPU runs them, on the processor: standing buffers, padded classes, drawing by the batch, one wait.

The recorder is the plain one; all else is what a GPU runs. Answers must be those of the ordinary path, token for token.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cohort.common import grammar
from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.forward import device_steps
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step import device_sampler
from cohort.common.engine.step.batch import SamplingRow
from cohort.common.engine.step.decode_classes import CaptureBudget
from cohort.common.engine.step.grammar_masks import TokenMasks
from cohort.common.engine.step.recorded_steps import PlainRecorder, Recorded, StepResult
from cohort.common.errors import ConfigError, InvariantViolated
from cohort.common.sampling_inputs import GrammarInputs, LogitBias, TokenHistory
from tests.common.engine.driver import (
    VOCAB,
    Driver,
    check_schedule,
    compile_grammars,
    make_runner,
    random_prompts,
    reference_generate,
    refusing,
    run_chunked,
    run_together,
    sampled_states,
    save_random_model,
)
from tests.engine_models import CONFIGS
from tests.services.gateway.tiny_model import byte_level

END = 2
GRAPHS = DeviceShare(graphs=1 << 40)


def device_runner(folder: Path, **overrides: Any) -> ModelRunner:
    runner = make_runner(folder, **{"device_steps": True, "share": GRAPHS, **overrides})
    runner.warm_up()
    return runner


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3", "opt"])
def test_answers_are_transformers_own(name: str, model_folder: Callable[[str], Path]) -> None:
    folder = model_folder(name)
    expected = reference_generate(folder, random_prompts((5, 33, 9)), 16)
    runner = device_runner(folder)
    assert runner._device_steps is not None
    assert runner._device_steps.decode.classes == (1, 2, 4, 8, 16)
    for schedule, options in (
        (run_together, {}),
        (run_chunked(7), {"shuffle": 4, "reverse": True}),
        (run_chunked(1), {"shuffle": 2}),
    ):
        runner.kv.with_spare.copy_(torch.randn_like(runner.kv.with_spare))  # whatever was there before
        assert check_schedule(runner, expected, schedule, **options) <= 1


def test_a_grammar_binds_the_rows_that_have_it_on_either_path(tmp_path: Path) -> None:
    """Through the whole runner: the tokenizer beside the weights, compilation, masks, and the rows beside it."""
    folder = save_random_model(CONFIGS["llama"](), tmp_path / "m")  # whose end token is the tokenizer's
    tokenizer = byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    texts = [grammar.of_regex("[0-9]{3}"), grammar.of_choice(["no", "yes"]), grammar.of_regex("("), ""]

    def generate(runner: ModelRunner) -> tuple[list[list[int]], set[int]]:
        compile_grammars(runner, *filter(None, texts))
        driver, inputs = Driver(runner), [GrammarInputs(text) if text else None for text in texts]
        for index, each in enumerate(inputs):
            driver.add(str(index), [5, 6, 7 + index], SamplingRow(index, 3, temperature=0.9, grammar=each))
        failed: set[int] = set()
        for step in range(4):
            plan = [(str(index), 1 if step else 3) for index in range(len(texts))]
            batch = replace(driver.batch(plan), grammars=tuple(each for each in inputs if each is not None))
            output = runner.execute(batch)
            failed |= set(output.failures)
            for (name, count), each, token in zip(plan, inputs, output.tokens.tolist(), strict=True):
                driver.requests[name].computed += count
                driver.requests[name].tokens.append(token)
                if each is not None and not each.failure and token != END:
                    each.output.append(token)
        return [driver.requests[str(index)].tokens[3:] for index in range(len(texts))], failed

    ordinary, failed = generate(make_runner(folder))
    assert (ordinary, failed) == generate(device_runner(folder))
    assert failed == {2}
    digits, choice = (tokenizer.decode(tokens[: tokens.index(END)]) for tokens in ordinary[:2])
    assert digits.isdecimal() and len(digits) == 3 and choice in ("no", "yes")


def test_a_step_with_grammars_samples_once(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The masks are known while the forward runs, and sampling is launched behind it."""
    runner = device_runner(model_folder("llama"))
    steps: Any = runner._device_steps
    sampled: list[int] = []
    launch = device_sampler.sample_rows

    def counted(logits: torch.Tensor, *others: Any) -> None:
        sampled.append(len(logits))
        launch(logits, *others)

    monkeypatch.setattr(device_sampler, "sample_rows", counted)
    only = TokenMasks(np.zeros((2, -(-VOCAB // 32)), dtype=np.int32))
    only.bits[0] = -1
    only.bits[1, 3] = 1 << 5
    driver = Driver(runner)
    for index, prompt in enumerate(random_prompts([4, 6])):
        driver.add(str(index), prompt)
    free = driver.step([("0", 4), ("1", 6)]).tokens.tolist()
    sampled.clear()
    batch = replace(driver.batch([("0", 1), ("1", 1)]), grammars=(GrammarInputs("anything"),))
    assert steps.decode.takes(batch) == 2
    with torch.inference_mode():
        bound = steps.launch(batch, lambda: only).finish().tokens.tolist()
        assert sampled == [2]
        without = steps.launch(replace(batch, grammars=())).finish().tokens.tolist()
    assert free and bound == [without[0], 3 * 32 + 5] and without[1] != bound[1]


def test_the_same_bits_as_the_ordinary_path(model_folder: Callable[[str], Path]) -> None:
    """Every number of rows up to the largest class: tokens, log-probabilities, final states and KV."""
    folder = model_folder("llama")
    ordinary, ours = make_runner(folder), device_runner(folder)
    ours.kv.with_spare.zero_()  # what warming up wrote
    drivers = [Driver(runner, shuffle=5, reverse=True) for runner in (ordinary, ours)]
    prompts = random_prompts([3 + index for index in range(16)])
    for driver in drivers:
        for index, prompt in enumerate(prompts):
            sampling = SamplingRow(seed=index, position=len(prompt), temperature=0.8, top_p=0.9, logprobs=index % 3 - 1)
            driver.add(str(index), prompt, sampling)
    for rows in range(1, 17):
        outputs = []
        for driver in drivers:
            names = [str(index) for index in range(rows)]
            outputs.append(driver.step([(name, driver.remaining(name)) for name in names]))
            assert len(sampled_states(driver.runner)) == rows
        assert outputs[0].tokens.tolist() == outputs[1].tokens.tolist()
        assert outputs[0].logprobs == outputs[1].logprobs
        assert torch.equal(*(sampled_states(driver.runner) for driver in drivers))
        assert torch.equal(ordinary.kv.blocks, ours.kv.blocks)


def test_padding_rows_touch_nothing_but_the_spare_block(model_folder: Callable[[str], Path]) -> None:
    runner = device_runner(model_folder("llama"))
    driver = Driver(runner)
    for index, prompt in enumerate(random_prompts([9, 4, 12])):
        driver.add(str(index), prompt)
    driver.step([(name, driver.remaining(name)) for name in driver.requests])
    before = runner.kv.blocks.clone()
    batch = driver.batch([(name, 1) for name in driver.requests])
    runner.execute(batch)
    changed = (runner.kv.blocks != before).flatten(1).any(dim=1).nonzero()[:, 0].tolist()
    assert sorted(changed) == sorted({int(slot) // runner.block_size for slot in batch.slot_mapping})


def test_a_row_that_samples_nothing_leaves_the_others_their_tokens(model_folder: Callable[[str], Path]) -> None:
    """Prompts in chunks of one token: decode-shaped rows of which only some are sampled."""
    folder = model_folder("llama")
    tokens = []
    for runner in (make_runner(folder), device_runner(folder)):
        driver = Driver(runner)
        driver.add("early", random_prompts([4])[0])
        driver.add("late", random_prompts([9], seed=2)[0])
        driver.step([("early", 4)])
        for _ in range(9):
            driver.step([("late", 1), ("early", 1)])
        tokens.append((driver.requests["early"].tokens, driver.requests["late"].tokens))
    assert tokens[0] == tokens[1]


class _Costly:
    """Every recording takes 100 bytes, the device refuses the class of 4, and the budget ends before the smallest."""

    def __init__(self) -> None:
        self.recorded = 0

    def record(self, step: Callable[[], StepResult]) -> Recorded:
        output = step()
        if len(output.logits) == 4:
            raise torch.OutOfMemoryError("no room")
        self.recorded += 1
        return Recorded(step, 100)


def test_the_budget_keeps_the_large_classes(model_folder: Callable[[str], Path]) -> None:
    runner = make_runner(model_folder("llama"), device_steps=True)
    assert runner._device_steps is not None
    decode, recorder = runner._device_steps.decode, _Costly()
    with torch.inference_mode():
        decode.record(recorder, CaptureBudget(310), first_estimate_bytes=200)
    assert decode.classes == (2, 8, 16)
    assert recorder.recorded == 3


def test_no_memory_for_graphs_means_step_by_step(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama")
    runner = device_runner(folder, share=DeviceShare(graphs=0))
    assert runner._device_steps is not None and runner._device_steps.decode.classes == ()
    expected = reference_generate(folder, random_prompts((5, 12)), 8)
    assert check_schedule(runner, expected, run_together) <= 1


def test_contexts_beyond_the_recorded_tables_run_step_by_step(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama")
    runner = device_runner(folder, max_context=24)
    expected = reference_generate(folder, random_prompts((20,)), 16)
    assert check_schedule(runner, expected, run_together) <= 1


def test_a_batch_the_device_refuses_runs_in_halves(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = device_runner(model_folder("llama"), share=DeviceShare())
    driver = Driver(runner)
    for index, prompt in enumerate(random_prompts([5, 9, 14])):
        driver.add(str(index), prompt)
    batch = driver.batch([(name, driver.remaining(name)) for name in driver.requests])
    expected = runner.execute(batch).tokens.tolist()
    steps: Any = runner._device_steps
    monkeypatch.setattr(steps, "launch", refusing(steps.launch, most_rows=2))
    assert runner.execute(batch).tokens.tolist() == expected
    assert runner.oom_retries == 1


def test_only_a_gpus_memory_divides_itself(model_folder: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"kv\.memory_bytes"):
        make_runner(model_folder("llama"), num_blocks=0)


def test_plain_recorder_runs_the_step_again() -> None:
    calls: list[int] = []

    def step() -> StepResult:
        calls.append(1)
        return StepResult(torch.empty(0), None)

    recorded = PlainRecorder().record(step)
    recorded.replay()
    assert (len(calls), recorded.cost_bytes) == (2, 0)


def test_the_buffers_of_recorded_steps_are_never_made_anew(model_folder: Callable[[str], Path]) -> None:
    """A larger step would free memory that a recorded one goes on writing into; where none is recorded it may."""
    folder = model_folder("llama")
    plain = device_runner(folder, share=DeviceShare(graphs=0))
    recorded = device_runner(folder)
    prompts = random_prompts([100] * (recorded.max_step_tokens // 100 + 1))
    for runner, served in ((plain, True), (recorded, False)):
        driver = Driver(runner)
        for index, prompt in enumerate(prompts):
            driver.add(str(index), prompt)
        whole = [(name, driver.remaining(name)) for name in driver.requests]
        if served:
            assert len(driver.step(whole).tokens) == len(prompts)
            continue
        model: Any = runner._model
        before = model._residual.data_ptr(), model._logits.data_ptr()
        with pytest.raises(InvariantViolated, match="recorded steps hold"):
            driver.step(whole)
        assert (model._residual.data_ptr(), model._logits.data_ptr()) == before


def test_recorded_steps_sample_any_mixture_themselves(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy, sampled, penalised, biased, banned rows, their number and order changing from step to step: no sampling
    beside the recorded step, and the ordinary path's tokens."""
    folder = model_folder("llama")
    ordinary, ours = make_runner(folder), device_runner(folder)
    kinds = (
        SamplingRow(seed=1, position=0, temperature=0.9, top_p=0.8),
        SamplingRow(seed=2, position=0, temperature=0.0, repetition_penalty=1.4, history=TokenHistory([5, 6, 7], [8])),
        SamplingRow(seed=3, position=0, temperature=1.2, top_k=7, min_p=0.01, logprobs=2),
        SamplingRow(seed=4, position=0, temperature=0.0),
        SamplingRow(seed=5, position=0, temperature=0.7, logit_bias=LogitBias.of({9: 4.0}), banned=(3, 4)),
        SamplingRow(seed=6, position=0, temperature=1.0, frequency_penalty=0.5, history=TokenHistory([], [9, 9, 10])),
    )
    drivers = [Driver(ordinary), Driver(ours)]
    for driver in drivers:
        for index, prompt in enumerate(random_prompts([4 + index for index in range(6)])):
            driver.add(str(index), prompt, kinds[index])
        driver.step([(name, driver.remaining(name)) for name in driver.requests])
    steps: Any = ours._device_steps

    def unrecorded(*args: Any) -> None:
        raise AssertionError("sampled beside the recorded step")

    monkeypatch.setattr(device_steps, "sample_on_device", unrecorded)
    order = random.Random(3)
    for _ in range(12):
        names = order.sample(sorted(drivers[0].requests), order.randint(1, 6))
        outputs = [driver.step([(name, 1) for name in names]) for driver in drivers]
        assert outputs[0].tokens.tolist() == outputs[1].tokens.tolist()
        assert outputs[0].logprobs == outputs[1].logprobs
    assert steps.decode.takes(drivers[1].batch([("0", 1)])) == 1


def test_steps_that_want_more_than_the_tables_hold_are_sampled_beside_them(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("llama")
    ordinary, ours = make_runner(folder), device_runner(folder)
    tokens = []
    for runner in (ordinary, ours):
        driver = Driver(runner)
        driver.add("0", random_prompts([5])[0], SamplingRow(seed=1, position=5, temperature=0.0, logprobs=30))
        for _ in range(4):
            output = driver.step([("0", driver.remaining("0"))])
            assert output.logprobs[0] is not None and len(output.logprobs[0].top_ids) == 30
        tokens.append(driver.requests["0"].tokens)
        steps: Any = runner._device_steps
        assert steps is None or steps.decode.takes(driver.batch([("0", 1)])) == 1
    assert tokens[0] == tokens[1]
