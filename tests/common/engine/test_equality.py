"""Greedy output equals transformers.generate, token for token in float32, however the step is put together."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest

from cohort.common.engine.config.model_config import read_geometry
from cohort.common.engine.runner.model_runner import ModelRunner
from cohort.kernels.cpu import native
from tests.common.engine.driver import (
    Expected,
    Schedule,
    check_schedule,
    make_runner,
    random_prompts,
    reference_generate,
    run_chunked,
    run_one_by_one,
    run_together,
)
from tests.support.kinds import by_default, in_turn

LEAN = [
    "llama",
    "llama-bias-llama3",
    "llama-yarn",
    "llama-linear",
    "llama-dynamic",
    "mistral-window",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "phi3",
    "phi3-longrope",
    "gemma2",
    "gemma2-uncapped",
    "gemma3",
    "gemma3-linear",
    "mixtral",
    "mixtral-window",
    "qwen3-moe",
    "qwen3-moe-sparse",
    "qwen2-moe",
    "qwen2-moe-window",
    "opt",
    "opt-350m-like",
    "opt-plain",
]
GENERIC = ["gpt-neox", "stablelm", "gemma", "phi", "gpt2"]
SCHEDULES: dict[str, tuple[Schedule, dict[str, object]]] = {
    "one by one": (run_one_by_one, {}),
    "together": (run_together, {}),
    "chunks of 7 beside decode": (run_chunked(7), {}),
    "chunks of 1": (run_chunked(1), {}),
    "shuffled blocks": (run_together, {"shuffle": 3}),
    "blocks in both directions": (run_chunked(5), {"shuffle": 4, "reverse": True}),
}
OUTPUTS = 24

Case = tuple[ModelRunner, list[Expected]]


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, model_folder: Callable[[str], Path]) -> Case:
    folder = model_folder(request.param)
    assert (read_geometry(folder).family == "generic") == (request.param in GENERIC)
    return make_runner(folder), reference_generate(folder, random_prompts((1, 5, 16, 33, 50)), OUTPUTS)


@pytest.mark.parametrize(
    ("case", "schedule"), in_turn(product(LEAN + GENERIC, SCHEDULES), len(SCHEDULES)), indirect=["case"], scope="module"
)
def test_greedy_equals_transformers(case: Case, schedule: str) -> None:
    runner, expected = case
    run, options = SCHEDULES[schedule]
    near_ties = check_schedule(runner, expected, run, **options)
    assert near_ties <= 1, f"{near_ties} of {len(expected)} answers left the reference at a near-tie"


@pytest.mark.parametrize("case", LEAN + GENERIC, indirect=True)
def test_reference_answers_are_not_degenerate(case: Case) -> None:
    """The comparison would prove little if every answer were one token over and over."""
    _, expected = case
    assert sum(len(set(one.tokens)) for one in expected) >= 3 * len(expected)


@pytest.mark.parametrize("name", by_default(["llama", "mistral-window", "opt", "gemma3"], "mistral-window"))
def test_the_reference_kernels_serve_the_engine_too(
    name: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What runs without a compiler and on other devices."""
    monkeypatch.setattr(native, "ops_for", lambda tensor: None)
    folder = model_folder(name)
    expected = reference_generate(folder, random_prompts((5, 33)), OUTPUTS)
    assert check_schedule(make_runner(folder), expected, run_chunked(7), shuffle=4, reverse=True) <= 1
