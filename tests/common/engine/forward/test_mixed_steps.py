"""Recorded steps of prompts beside decode rows answer what unrecorded ones do, and only they are recorded that gain."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cohort.common.engine.config.device_memory import DeviceShare
from cohort.common.engine.forward import static_mixed
from cohort.common.engine.forward.device_steps import launching_takes_longer
from cohort.common.engine.forward.static_mixed import PROMPT_ROWS
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import SamplingRow, StepBatch
from cohort.common.engine.step.decode_classes import MixedClass
from tests.common.engine.config.test_device_memory import LLAMA_8B
from tests.common.engine.driver import (
    Driver,
    check_schedule,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
    sampled_states,
)

GRAPHS = DeviceShare(graphs=1 << 40)


def recorded_runner(folder: Path, **overrides: Any) -> ModelRunner:
    runner = make_runner(folder, **{"device_steps": True, "share": GRAPHS, **overrides})
    runner.warm_up()
    return runner


def counted(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[MixedClass]:
    """The classes of the steps with prompts that run recorded, as they do."""
    steps: Any = runner._device_steps
    run, taken = steps.mixed.run, []

    def counting(batch: StepBatch, mixed: MixedClass, *others: Any) -> Any:
        taken.append(mixed)
        return run(batch, mixed, *others)

    monkeypatch.setattr(steps.mixed, "run", counting)
    return taken


@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen3", "opt"])
def test_answers_are_transformers_own(
    name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_folder(name)
    expected = reference_generate(folder, random_prompts((5, 33, 9, 21)), 12)
    runner = recorded_runner(folder)
    taken = counted(runner, monkeypatch)
    runner.kv.with_spare.copy_(torch.randn_like(runner.kv.with_spare))  # whatever was there before
    assert check_schedule(runner, expected, run_chunked(7), shuffle=4, reverse=True) <= 1
    assert len(taken) == 11  # chunks of 7, those of one token apart
    assert check_schedule(runner, expected, run_chunked(40), shuffle=3) <= 1
    assert set(taken) == {(16, 8), (64, 8)} | ({(32, 8)} & set(taken))


def test_the_same_bits_as_unrecorded_steps(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Up to eight prompts at once beside up to eight decodes: tokens, log-probabilities, states, KV."""
    folder = model_folder("llama")
    plain, ours = make_runner(folder, num_blocks=200), recorded_runner(folder, num_blocks=200)
    ours.kv.with_spare.zero_()  # what warming up wrote
    taken = counted(ours, monkeypatch)
    drivers = [Driver(runner, shuffle=5, reverse=True) for runner in (plain, ours)]
    draw, mixed = random.Random(7), 0
    for round_ in range(5):
        for index in range(draw.randint(1, PROMPT_ROWS)):
            name, prompt = f"{round_}-{index}", random_prompts([draw.randint(2, 40)], seed=10 * round_ + index)[0]
            sampling = SamplingRow(round_ + index, len(prompt), temperature=0.8, top_p=0.9, logprobs=index % 3 - 1)
            for driver in drivers:
                driver.add(name, prompt, sampling)
        for _ in range(3):
            waiting = [each for each in drivers[0].requests if drivers[0].remaining(each) > 1]
            decoding = [each for each in drivers[0].requests if drivers[0].remaining(each) == 1]
            plan = [(each, draw.randint(1, drivers[0].remaining(each))) for each in waiting[:PROMPT_ROWS]]
            plan += [(each, 1) for each in draw.sample(decoding, min(len(decoding), draw.randint(0, 8)))]
            if not plan:
                continue
            outputs = [driver.step(plan) for driver in drivers]
            mixed += any(count > 1 for _, count in plan)
            assert outputs[0].tokens.tolist() == outputs[1].tokens.tolist()
            assert outputs[0].logprobs == outputs[1].logprobs
            assert torch.equal(*(sampled_states(driver.runner) for driver in drivers))
            assert torch.equal(plain.kv.blocks, ours.kv.blocks)
    assert len(taken) == mixed > 8


def test_padding_touches_nothing_but_the_spare_block(model_folder: Callable[[str], Path]) -> None:
    runner = recorded_runner(model_folder("llama"))
    driver = Driver(runner)
    for index, prompt in enumerate(random_prompts([9, 4, 12])):
        driver.add(str(index), prompt)
    driver.step([("0", 9)])
    batch = driver.batch([("0", 1), ("1", 4), ("2", 5)])
    before = runner.kv.blocks.clone()
    assert runner._device_steps is not None and runner._device_steps.mixed.takes(batch) == (16, 8)
    runner.execute(batch)
    changed = (runner.kv.blocks != before).flatten(1).any(dim=1).nonzero()[:, 0].tolist()
    assert sorted(changed) == sorted({int(slot) // runner.block_size for slot in batch.slot_mapping})


def test_what_is_not_taken(model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    runner = recorded_runner(model_folder("llama"), max_context=64)
    assert runner._device_steps is not None
    mixed = runner._device_steps.mixed
    assert mixed.classes == ((16, 8), (16, 16), (32, 8), (32, 16), (64, 8), (64, 16))  # no padding row beyond 64
    driver = Driver(runner)
    for index in range(PROMPT_ROWS + 1):
        driver.add(str(index), random_prompts([4])[0])
    driver.add("long", random_prompts([70])[0])
    every = [(str(index), 3) for index in range(PROMPT_ROWS + 1)]
    assert mixed.takes(driver.batch(every[:-1])) == (32, 8)
    assert mixed.takes(driver.batch(every)) is None  # more prompts than a class has rows for
    assert mixed.takes(driver.batch([("0", 1)])) is None  # no prompt
    assert mixed.takes(driver.batch([("long", 60)])) == (64, 8)
    batch = driver.batch([("long", 60)])
    assert mixed.takes(driver.batch([("long", 66)])) is None  # more tokens than any class
    monkeypatch.setattr(static_mixed, "LONGEST_CONTEXT", 59)
    assert mixed.takes(batch) is None


def test_no_memory_for_graphs_records_none(model_folder: Callable[[str], Path]) -> None:
    runner = recorded_runner(model_folder("llama"), share=DeviceShare(graphs=0))
    assert runner._device_steps is not None and runner._device_steps.mixed.classes == ()


def test_only_steps_whose_launches_the_device_would_wait_for() -> None:
    """Llama-3-8B: launching takes 5 ms, reading the weights 3.5, the products of 270 tokens as long as launching."""
    assert launching_takes_longer(LLAMA_8B, 2, 64)
    assert not launching_takes_longer(LLAMA_8B, 2, 512)
    one = dataclasses.replace(LLAMA_8B, hidden_size=2048, intermediate_size=8192, num_layers=16, head_dim=64)
    assert launching_takes_longer(one, 2, 512) and not launching_takes_longer(one, 2, 2048)
    assert launching_takes_longer(dataclasses.replace(LLAMA_8B, family="generic"), 2, 512)
