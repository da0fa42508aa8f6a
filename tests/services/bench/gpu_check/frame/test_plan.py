"""The plans: their order, and deadlines that never starve a later section."""

from __future__ import annotations

from itertools import pairwise

import pytest

from cohort.services.bench.gpu_check import __main__ as sections
from cohort.services.bench.gpu_check.frame.plan import PLANS, SECTIONS, SETUP_S, TOTAL_S, deadlines, sections_of


@pytest.mark.parametrize("plan", ["A", "B"])
def test_seconds_add_up_to_the_plan(plan) -> None:  # type: ignore[no-untyped-def]
    assert SETUP_S + sum(PLANS[plan].values()) == TOTAL_S
    assert TOTAL_S <= 9 * 60


def test_every_section_is_in_one_plan_and_can_be_run() -> None:
    assert len(set(SECTIONS)) == len(SECTIONS)
    assert set(SECTIONS) == set(sections.RUN)


def test_order_of_plan_a() -> None:
    """Whether it works at all, then what users see, then where the time goes."""
    order = sections_of("A", None)
    assert order[:3] == ["device", "smoke", "kernels"]
    assert order.index("pipeline") < order.index("model-8b") < order.index("golden")


@pytest.mark.parametrize("total_s", [540.0, 300.0, 900.0])
def test_deadlines_leave_later_sections_their_time(total_s: float) -> None:
    found = deadlines(sections_of("B", None), total_s)
    assert found[-1] == ("tests", pytest.approx(total_s))
    for (_, earlier_s), (section, later_s) in pairwise(found):
        assert later_s - earlier_s == pytest.approx(PLANS["B"][section] * total_s / TOTAL_S)


def test_named_sections_keep_the_plans_order() -> None:
    assert sections_of("A", ["tests", "kernels", "smoke"]) == ["smoke", "kernels", "tests"]
    assert deadlines(["smoke", "tests"], TOTAL_S)[-1][1] < TOTAL_S / 2
