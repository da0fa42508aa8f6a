"""E9: An SLO, or the undisturbed time of a request's tokens times the scale."""

from __future__ import annotations

import msgspec
import pytest

from cohort.common.policies.ecoserve.deadlines import Deadlines
from cohort.common.policies.step_times.profile_table import ProfileTable
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.sequence import Sequence
from cohort.common.types import Slo, StepTimes
from tests.common.policies.baselines.drive import sequence

TRUE = StepTimes(step_s=2e-3, row_s=1e-4, token_s=1e-4, floor_s=8e-3, pair_s=1e-8, position_s=1e-7)


def with_slo(slo: Slo) -> Sequence:
    made = sequence("a", 10, arrived_s=5.0, predicted=20.0)
    made.request = msgspec.structs.replace(made.request, slo=slo)
    return made


def learned(shapes: list[BatchShape]) -> ProfileTable:
    table = ProfileTable()
    for shape in shapes * 4:
        table.record(shape, step_seconds(TRUE, shape))
    return table


def varied() -> list[BatchShape]:
    prompts = [BatchShape(n, 1, n * (n + 1) // 2, 0, 0) for n in (8, 32, 64, 128, 256, 512)]
    decodes = [BatchShape(0, 0, 0, rows, rows * context) for rows in (1, 2, 8, 32) for context in (16, 256, 1024)]
    return prompts + decodes


def test_scale_times_prompt_and_tokens() -> None:
    deadlines = Deadlines(learned(varied()), 2.0)
    deadlines.meet(with_slo(Slo()))
    prompt_s, token_s = (
        step_seconds(TRUE, BatchShape(10, 1, 55, 0, 0)),
        step_seconds(TRUE, BatchShape(0, 0, 0, 1, 20)),
    )
    assert deadlines.prompt_s == pytest.approx(prompt_s, rel=0.1)
    assert deadlines.token_s == pytest.approx(token_s, rel=0.1)
    assert deadlines.of(with_slo(Slo())) == pytest.approx(5.0 + 2.0 * (prompt_s + token_s * 20), rel=0.02)


def test_load_does_not_relax_deadlines() -> None:
    """Iterations of 64 decodes beside long prompts take ten times an undisturbed token's time."""
    crowded = [BatchShape(n, 1, n * n // 2, rows, rows * 512) for n in (256, 512, 1024) for rows in (16, 64)]
    deadlines = Deadlines(learned([*varied(), *crowded * 10]), 2.0)
    deadlines.meet(with_slo(Slo()))
    quiet = step_seconds(TRUE, BatchShape(0, 0, 0, 1, 20))
    assert deadlines.token_s == pytest.approx(quiet, rel=0.15)
    assert step_seconds(TRUE, crowded[-1]) > 8 * quiet


def test_new_constants_count_once_they_are_learned() -> None:
    table = ProfileTable()
    deadlines = Deadlines(table, 2.0)
    deadlines.meet(with_slo(Slo()))
    assert deadlines.of(with_slo(Slo())) == 5.0
    for shape in varied() * 4:
        table.record(shape, step_seconds(TRUE, shape))
    deadlines.refresh()
    assert deadlines.of(with_slo(Slo())) > 5.0


def test_an_slo_goes_first() -> None:
    deadlines = Deadlines(ProfileTable(), 2.0)
    assert deadlines.of(with_slo(Slo(deadline_s=3.0, ttft_s=1.0))) == 8.0
    assert deadlines.of(with_slo(Slo(ttft_s=1.0, tpot_s=0.1))) == 5.0 + 1.0 + 2.0


def test_nothing_learned_is_due_at_once() -> None:
    assert Deadlines(ProfileTable(), 2.0).of(with_slo(Slo())) == 5.0
