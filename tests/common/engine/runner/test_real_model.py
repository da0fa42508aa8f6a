"""The default model: equality with transformers on real text, and what bfloat16 costs in agreement."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from cohort.common.engine.runner.model_runner import ModelRunner
from tests.common.engine.driver import (
    Driver,
    Expected,
    check_schedule,
    make_runner,
    reference_generate,
    run_chunked,
    run_together,
)
from tests.examples import another_of_its_kind, nightly

pytestmark = pytest.mark.slow

PROMPTS = [
    "The largest planet of the solar system is",
    "Once upon a time, in a village at the foot of a mountain, there lived",
    "def fibonacci(n):\n    ",
    "List three reasons why the sea is salty.\n1.",
    "The train leaves at nine and arrives at noon. How long does it travel? It travels",
    "In the year 1905 a young clerk at the patent office in Bern published four papers. " * 4 + "They",
]
OUTPUTS = 12 if nightly() else 6


@pytest.fixture(scope="module")
def expected(real_model: Path) -> list[Expected]:
    tokenizer = Tokenizer.from_file(str(real_model / "tokenizer.json"))
    chosen = PROMPTS if nightly() else [PROMPTS[0], PROMPTS[-1]]
    return reference_generate(real_model, [tokenizer.encode(prompt).ids for prompt in chosen], OUTPUTS)


@pytest.fixture(scope="module")
def runner(real_model: Path) -> ModelRunner:
    return make_runner(real_model, block_size=16)


@another_of_its_kind()
def test_together(runner: ModelRunner, expected: list[Expected]) -> None:
    assert check_schedule(runner, expected, run_together, shuffle=1) <= 1


def test_chunks_in_both_directions(runner: ModelRunner, expected: list[Expected]) -> None:
    assert check_schedule(runner, expected, run_chunked(24), shuffle=2, reverse=True) <= 1


def test_bfloat16_agrees_mostly(real_model: Path, expected: list[Expected]) -> None:
    """Teacher-forced: after each reference prefix, does bfloat16 choose the same token?"""
    runner = make_runner(real_model, block_size=16, dtype="bfloat16")
    driver = Driver(runner)
    agreed = 0
    for index, one in enumerate(expected):
        driver.add(str(index), one.prompt)
        for token in one.tokens:
            driver.step([(str(index), driver.remaining(str(index)))])
            agreed += driver.requests[str(index)].tokens[-1] == token
            driver.requests[str(index)].tokens[-1] = token
    total = len(list(itertools.chain.from_iterable(one.tokens for one in expected)))
    assert agreed >= 0.9 * total, f"only {agreed} of {total} tokens agree"
