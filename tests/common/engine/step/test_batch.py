"""Step batches: what `check` refuses, and that halves of a batch compute the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cohort.common.engine.step.batch import StepBatch
from cohort.common.errors import InvariantViolated
from tests.common.engine.driver import Driver, make_runner, random_prompts


@pytest.fixture
def driver(model_folder: Callable[[str], Path]) -> Driver:
    driver = Driver(make_runner(model_folder("llama")), shuffle=5, reverse=True)
    for index, prompt in enumerate(random_prompts([9, 14, 3, 20])):
        driver.add(str(index), prompt)
    driver.step([("1", 14)])  # "1" decodes next; "3" only starts
    return driver


@pytest.fixture
def batch(driver: Driver) -> StepBatch:
    return driver.batch([("0", 9), ("2", 3), ("3", 11), ("1", 1)])


def test_check_accepts_batches_of_the_driver(batch: StepBatch) -> None:
    batch.check()
    assert (batch.num_rows, batch.num_tokens) == (4, 24)
    assert batch.sample_rows.tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("slot_mapping", lambda a: np.full_like(a, 3), "slots are distinct"),
        ("context_lens", lambda a: a + 1, "last position is its context's last"),
        ("query_start", lambda a: a + 1, "does not cut 24 tokens"),
        ("sampling", lambda rows: rows[:1], "one sampling row per sampled token"),
        ("directions", lambda a: a[:, :1], "directions match"),
    ],
)
def test_check_names_the_fault(batch: StepBatch, field: str, change: Callable, message: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(InvariantViolated, match=message):
        dataclasses.replace(batch, **{field: change(getattr(batch, field))}).check()


def test_halves_compute_the_same(driver: Driver, batch: StepBatch) -> None:
    whole = driver.runner.execute(batch)
    first, second = batch.split()
    first.check()
    second.check()
    halves = [driver.runner.execute(first), driver.runner.execute(second)]
    assert np.concatenate([half.tokens for half in halves]).tolist() == whole.tokens.tolist()


def test_one_row_cannot_be_split(driver: Driver) -> None:
    with pytest.raises(InvariantViolated, match="one row"):
        driver.batch([("0", 9)]).split()
