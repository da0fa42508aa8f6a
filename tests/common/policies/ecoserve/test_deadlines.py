"""E9: An SLO, or the measured time of a request's tokens times the scale."""

from __future__ import annotations

import msgspec

from cohort.common.policies.ecoserve.deadlines import Deadlines
from cohort.common.policies.interface import IterationPlan, Ran, Row
from cohort.common.sequence import Sequence
from cohort.common.types import Slo
from tests.common.policies.baselines.drive import sequence


def with_slo(slo: Slo) -> Sequence:
    made = sequence("a", 10, arrived_s=5.0, predicted=20.0)
    made.request = msgspec.structs.replace(made.request, slo=slo)
    return made


def test_scale_times_prompt_and_tokens() -> None:
    deadlines = Deadlines(2.0)
    row, token = Row(sequence("p", 10), 0, 10), Row(sequence("t", 10), 9, 1)
    deadlines.observe(Ran(IterationPlan(rows=[row]), 0.5, (0.5,)))
    deadlines.observe(Ran(IterationPlan(rows=[row, token]), 0.5, (0.5,)))
    deadlines.observe(Ran(IterationPlan(rows=[token]), 0.5, (9.0,)))  # no prompts: says nothing
    assert deadlines.of(with_slo(Slo())) == 5.0 + 2.0 * (0.5 + 0.5 * 20)


def test_an_slo_goes_first() -> None:
    deadlines = Deadlines(2.0)
    assert deadlines.of(with_slo(Slo(deadline_s=3.0, ttft_s=1.0))) == 8.0
    assert deadlines.of(with_slo(Slo(ttft_s=1.0, tpot_s=0.1))) == 5.0 + 1.0 + 2.0


def test_nothing_measured_is_due_at_once() -> None:
    assert Deadlines(2.0).of(with_slo(Slo())) == 5.0
