"""Which iterations teach something, and in which numbers."""

from __future__ import annotations

from typing import Literal

import pytest

from cohort.common.policies.interface import IterationPlan
from cohort.common.policies.kv_interface import KvCopy
from cohort.common.policies.step_times.learned_times import LearnedTimes, plan_shape
from cohort.common.policies.step_times.step_cost import BatchShape
from cohort.common.sequence import Row
from tests.common.policies.baselines.drive import BLOCK, GEOMETRY, sequence

A, B = sequence("a", 100), sequence("b", 60)


def decodes(start: int = 100) -> IterationPlan:
    return IterationPlan(rows=[Row(A, start, 1), Row(B, start, 1)])


def copy(unit: Literal["block", "slot"], count: int, *, beside: bool = False) -> KvCopy:
    return KvCopy("in", unit, tuple(range(count)), tuple(range(count)), beside)


def test_decodes_that_repeat_by_row_are_noted_once() -> None:
    times = LearnedTimes()
    assert times.note(decodes(), 0.01, GEOMETRY) == BatchShape(0, 0, 0, 2, 202)
    assert times.note(decodes(101), 0.01, GEOMETRY) is None
    assert times.knows(decodes(102))
    prompt = IterationPlan(rows=[Row(A, 0, 50), Row(B, 100, 1)])
    assert times.note(prompt, 0.02, GEOMETRY) == BatchShape(50, 1, 50 * 51 // 2, 1, 101)
    assert times.note(prompt, 0.02, GEOMETRY) is not None  # prompts teach every time
    assert times.note(decodes(103), 0.01, GEOMETRY) is not None  # another composition came between
    assert times.note(IterationPlan(), 0.01, GEOMETRY) is None


def test_the_same_rows_with_more_than_one_token_are_another_composition() -> None:
    times = LearnedTimes()
    times.note(decodes(), 0.01, GEOMETRY)
    again = IterationPlan(rows=[Row(A, 0, 100), Row(B, 100, 1)])  # it was preempted
    assert times.note(again, 0.01, GEOMETRY) is not None


def test_copies_before_the_rows_are_counted_in_positions() -> None:
    plan = decodes()
    plan.copies = [copy("block", 3), copy("slot", 5)]
    assert plan_shape(plan, GEOMETRY).copied == 3 * BLOCK + 5
    assert plan_shape(plan).copied == 0
    times = LearnedTimes()
    assert times.note(plan, 0.02, GEOMETRY) == BatchShape(0, 0, 0, 2, 202, 3 * BLOCK + 5)
    assert not times.knows(plan)  # without its copies it would be new
    alone = IterationPlan(copies=[copy("block", 3)])
    assert times.note(alone, 0.02, GEOMETRY) == BatchShape(0, 0, 0, 0, 0, 3 * BLOCK)


def test_copies_beside_the_rows_say_nothing_of_either() -> None:
    plan = decodes()
    plan.copies = [copy("block", 3), copy("block", 3, beside=True)]
    times = LearnedTimes()
    assert times.note(plan, 0.02, GEOMETRY) is None
    assert len(times.table) == 0


def test_only_iterations_without_copies_count_as_late() -> None:
    times = LearnedTimes()
    plan = IterationPlan(rows=[Row(A, 0, 50), Row(B, 100, 1)], copies=[copy("block", 1)], estimated_s=0.01)
    times.note(plan, 0.1, GEOMETRY)
    assert times.lateness.ratio == 1.0
    plan.copies = []
    times.note(plan, 0.1, GEOMETRY)
    assert times.lateness.ratio == pytest.approx(1.1, rel=0.02)


def test_cells_enough_for_a_curve_are_kept_before_it_is_fitted() -> None:
    times = LearnedTimes()
    for count in (1, 2, 4, 8, 16):
        times.note(IterationPlan(rows=[Row(A, 0, count)]), 0.01 * count, GEOMETRY)
    assert times.export_state() == b""
    times.note(IterationPlan(rows=[Row(A, 0, 32)]), 0.32, GEOMETRY)
    assert times.step_times() is None
    after = LearnedTimes()
    after.import_state(times.export_state())
    assert after.step_times() is not None
