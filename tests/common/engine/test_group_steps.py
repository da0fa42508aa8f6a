"""Steps of several ranks as GPUs run them, on the processor: the same classes recorded, in the same order, and replayed.

The recorder is the plain one, so an exchange of a recorded step is gloo's; all else is what GPUs run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cohort.common.engine.model_runner import ModelRunner
from tests.common.engine.driver import check_schedule, random_prompts, reference_generate, run_chunked, run_together
from tests.common.engine.groups import group_runner

MUCH = 1 << 40


@pytest.fixture(scope="module")
def group(model_folder: Callable[[str], Path]) -> Iterator[ModelRunner]:
    with group_runner(model_folder("qwen3"), 2, graphs=(MUCH, MUCH)) as runner:
        runner.warm_up()
        yield runner


def test_answers_are_transformers_own(group: ModelRunner, model_folder: Callable[[str], Path]) -> None:
    expected = reference_generate(model_folder("qwen3"), random_prompts((5, 33, 9)), 12)
    assert group.recorded_classes == (1, 2, 4, 8, 16)
    assert check_schedule(group, expected, run_together) <= 1
    assert check_schedule(group, expected, run_chunked(7), shuffle=4, reverse=True) <= 1
