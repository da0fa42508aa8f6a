"""Batch-size classes and the memory of their graphs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cohort.common.engine.step.decode_classes import (
    CaptureBudget,
    MixedClass,
    batch_classes,
    capture_order,
    class_for,
    mixed_class_for,
    mixed_classes,
)
from tests.examples import examples


def test_classes_of_the_default_number_of_rows() -> None:
    assert batch_classes(256) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256)
    assert batch_classes(20) == (1, 2, 4, 8, 16, 20)
    assert batch_classes(1) == (1,)
    assert batch_classes(400)[-3:] == (320, 384, 400)


@settings(max_examples=examples(0.6))
@given(st.integers(1, 3000), st.data())
def test_every_batch_has_a_class_and_little_padding(max_rows: int, data: st.DataObject) -> None:
    classes = batch_classes(max_rows)
    rows = data.draw(st.integers(1, max_rows))
    size = class_for(rows, classes)
    assert size is not None
    assert size == min(each for each in classes if each >= rows)
    assert size - rows <= max(7, rows // 3)
    assert list(classes) == sorted(set(classes))


def test_a_batch_takes_a_larger_class_where_its_own_is_missing() -> None:
    assert class_for(3, (64, 8)) == 8
    assert class_for(9, (64, 8)) == 64
    assert class_for(65, (64, 8)) is None
    assert class_for(1, ()) is None


def test_steps_with_prompts_are_padded_to_powers_of_two() -> None:
    classes = mixed_classes(100, 170, lambda tokens: True)
    assert classes == tuple(
        MixedClass(tokens, rows) for tokens in (16, 32, 64, 128) for rows in (8, 32, 100) if tokens + rows <= 170
    )
    assert mixed_classes(256, 4096, lambda tokens: tokens <= 48) == ((16, 8), (16, 32), (32, 8))
    assert mixed_classes(256, 4096, lambda tokens: False) == ()
    assert max(mixed_classes(4, 4096, lambda tokens: True)) == (1024, 4)


def test_a_step_with_prompts_takes_the_class_with_the_fewest_tokens() -> None:
    classes = [MixedClass(16, 32), MixedClass(32, 8), MixedClass(64, 8), MixedClass(64, 32)]
    assert mixed_class_for(16, 8, classes) == (32, 8)
    assert mixed_class_for(16, 9, classes) == (16, 32)
    assert mixed_class_for(33, 9, classes) == (64, 32)
    assert mixed_class_for(65, 1, classes) is None
    assert mixed_class_for(1, 33, classes) is None
    assert mixed_class_for(1, 1, ()) is None


def test_largest_first() -> None:
    assert capture_order((1, 2, 8)) == (8, 2, 1)


def test_budget() -> None:
    budget = CaptureBudget(100)
    assert budget.admits(100) and not budget.admits(101)
    assert budget.spend(60)
    assert not budget.admits(41) and budget.admits(40)
    assert not budget.spend(41)  # took more than was thought: given up, and not accounted
    assert budget.spent_bytes == 60
    assert budget.spend(-5) and budget.spent_bytes == 60  # the driver gave memory back meanwhile
