"""The plans: their order, and deadlines that never starve a later section."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cohort.services.bench.gpu_check import __main__ as sections
from cohort.services.bench.gpu_check.frame.plan import CLOSING_S, PLANS, SECTIONS, SETUP_S, Plan, deadlines, plan_of


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_seconds_add_up_to_the_plan(plan: Plan) -> None:
    taken = max(plan.seconds.values()) if plan.together else sum(plan.seconds.values())
    assert SETUP_S + taken + CLOSING_S == plan.total_s <= 4 * 60


def test_every_section_is_planned_and_can_be_run() -> None:
    assert set(SECTIONS) == set(sections.RUN)


def test_what_the_plans_hold() -> None:
    """Right or wrong within three minutes, side by side; then speed, alone."""
    assert PLANS["A"].together and PLANS["A"].total_s == 180
    wanted = {"smoke", "kernels", "golden", "families", "formats", "kv-transfer", "pipeline", "pipeline-disaggregated"}
    assert wanted <= set(PLANS["A"].seconds)
    assert list(PLANS["B"].seconds) == ["device", "pipeline", "pipeline-unified", "model-8b", "products"]
    assert not PLANS["B"].together and not PLANS["C"].together


@pytest.mark.parametrize("total_s", [240.0, 120.0, 900.0])
def test_deadlines_leave_later_sections_their_time(total_s: float) -> None:
    plan = PLANS["C"]
    found, scale = deadlines(plan, total_s), total_s / plan.total_s
    assert found[-1][0] == "tests" and found[-1][1] == pytest.approx(total_s - CLOSING_S * scale)
    for (_, earlier_s), (section, later_s) in pairwise(found):
        assert later_s - earlier_s == pytest.approx(plan.seconds[section] * scale)


def test_deadlines_side_by_side_count_from_the_set_up() -> None:
    plan = PLANS["A"]
    assert dict(deadlines(plan, plan.total_s)) == {name: SETUP_S + each for name, each in plan.seconds.items()}


def test_named_sections_keep_the_plans_order() -> None:
    plan = plan_of("A", ["tests", "kernels", "device"])
    assert list(plan.seconds) == ["device", "kernels", "tests"] and not plan.together
    assert plan.seconds["device"] == PLANS["A"].seconds["device"]  # the longest that a plan gives it
    assert plan.total_s == SETUP_S + sum(plan.seconds.values()) + CLOSING_S
