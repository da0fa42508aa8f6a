"""A request's KV and log-probabilities have the same bits however its positions were cut into steps.

As a prompt at once, in chunks, token by token and in rows of a few positions, alone and beside others: every lean model
on the CPU, in float32 and, where the processor multiplies it, in bfloat16.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.common.engine.step.batch import SamplingRow, TokenLogprobs
from cohort.kernels.cpu import native
from tests.common.engine.driver import Driver, make_runner, random_prompts
from tests.examples import another_of_its_kind

MODELS = [
    "llama",
    "qwen2-window",
    "qwen3",
    "phi3",
    "opt",
    "mixtral",
    "qwen2-moe",
    "gemma2",
    "gemma3",
    "gpt-oss",
    "deepseek2",
]
LENGTH = 150


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    if native.implementation() != "native":
        pytest.skip("the reference multiplies by torch, whose sums follow the shape of a product")
    if request.param == "bfloat16" and not native.operators().panels_multiply_bf16():
        pytest.skip("without products of bfloat16 torch multiplies")
    return str(request.param)


@pytest.fixture(scope="module", params=MODELS)
def runner(request: pytest.FixtureRequest, model_folder: Callable[[str], Path], dtype: str) -> ModelRunner:
    return make_runner(model_folder(request.param), dtype=dtype)


def _computed(runner: ModelRunner, counts: Sequence[int], companions: int) -> tuple[Tensor, TokenLogprobs | None, int]:
    """KV of the first request's positions, and the log-probabilities and the token behind them."""
    driver = Driver(runner, shuffle=sum(counts), reverse=True)
    prompts = random_prompts([LENGTH, *[60 + 7 * index for index in range(companions)]])
    for index, prompt in enumerate(prompts):
        driver.add(str(index), prompt)
    driver.requests["0"].sampling = SamplingRow(seed=3, position=LENGTH, temperature=0.8, logprobs=4)
    others = [str(index) for index in range(1, 1 + companions)]
    for step, count in enumerate(counts):
        plan = [("0", count), *[(name, min(1 + step % 9, driver.remaining(name))) for name in others]]
        ordered = sorted(plan, key=lambda entry: entry[1] == 1)
        sampled = [name for name, number in ordered if number == driver.remaining(name)]
        output = driver.step(plan)
    request = driver.requests["0"]
    slots = torch.tensor([driver.slot(request, position) for position in range(LENGTH)])
    size = runner.block_size
    kv = runner.kv.blocks[slots // size, :, :, :, slots % size].clone()
    place = sampled.index("0")
    return kv, output.logprobs[place], int(output.tokens[place])


def _cut(longest: int, seed: int) -> list[int]:
    chance, counts = random.Random(seed), list[int]()
    while (rest := LENGTH - sum(counts)) > 0:
        counts.append(min(rest, chance.randint(1, longest)))
    return counts


@pytest.mark.parametrize("companions", [pytest.param(0, marks=another_of_its_kind()), 3])
def test_every_cut_computes_the_same(runner: ModelRunner, companions: int) -> None:
    whole = _computed(runner, [LENGTH], 0)
    for counts in ([1] * LENGTH, _cut(9, 1), _cut(60, 2), [LENGTH - 5, 5]):
        kv, logprobs, token = _computed(runner, counts, companions)
        differ = (kv.float() != whole[0].float()).flatten(1).any(1)
        assert not differ.any(), f"{int(differ.sum())} positions from {int(differ.int().argmax())} on, cut {counts[:9]}"
        assert (logprobs, token) == whole[1:]
