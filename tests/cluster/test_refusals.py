"""Requests are refused and demoted at placement while anything breaks: each still ends exactly once, nothing is left
anywhere, what was accepted is served, and recordings replay."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.machines.replayer import replay
from cohort.common.policies.baselines.placements import Colocated
from cohort.common.types import FinishReason, IfLate, Slo
from tests.cluster.cases import Case, cases
from tests.cluster.refusing import Refusing
from tests.cluster.test_replays import check, record
from tests.common.machines.clusters import Asked, of_config, small, submit_at, tokens
from tests.common.machines.world import Owned, World
from tests.examples import of_worlds

PRESET = "cohort"
SERVED = (FinishReason.STOP, FinishReason.LENGTH)


def strict(check_case: Callable[[Case], None], share: float) -> None:
    """Its own workers and faults; SLOs so tight that some are kept and some are not."""

    @of_worlds(share)
    @given(case=cases(PRESET), ttft_s=st.sampled_from([0.02, 0.1, 0.5]), choices=st.sampled_from([1, 1, 3]))
    def cases_of(case: Case, ttft_s: float, choices: int) -> None:
        check_case(replace(case, ttft_s=ttft_s, choices=choices))

    cases_of()


def test_refusals_under_faults() -> None:
    strict(lambda case: case.live() and None, 0.3)


def test_refusals_replays() -> None:
    def replays(case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for path in record(case, Path(folder)):
                check(replay(path))

    strict(replays, 0.05)


def overloaded(world: World, outcomes: Sequence[IfLate]) -> list[Owned]:
    """So much at once that not all can be in time; requests prefer these outcomes in turn."""
    random = Random(1)
    for index in range(40):
        asked = Asked(tokens(random, 40), 10, slo=Slo(ttft_s=0.1), if_late=outcomes[index % len(outcomes)])
        submit_at(world, 1.0 + 0.001 * index, f"r{index}", asked)
    world.run(4.0)
    world.run_until_quiet()
    world.check_outputs()
    return [world.owned[f"r{index}"] for index in range(40)]


def warmed(refuse_late: str = "named") -> World:
    """Its workers have said what a token takes."""
    workers = {"workers": [{"role": "unified", "count": 2}]}
    world = of_config(7, small(PRESET, {"cohort": {"refuse_late": refuse_late}}, workers))
    random = Random(2)
    for index in range(6):
        submit_at(world, 0.1 * index, f"warm{index}", Asked(tokens(random, 20), 4))
    return world


def test_under_overload_each_gets_what_it_asked_for() -> None:
    world = warmed()
    asked = overloaded(world, ("refuse", "best_effort", "serve"))
    refused = [index for index, owned in enumerate(asked) if owned.refused]
    assert refused, "none was late"
    assert {index % 3 for index in refused} == {0}, "only those that prefer it"
    stats = world.manager.stats()
    assert stats["refused_infeasible_total"] == len(refused)
    assert stats["demoted_total"] > 0
    assert all(owned.finish in SERVED for owned in asked if not owned.refused)


@pytest.mark.parametrize("refuse_late", ["none", "named", "all"])
def test_the_operator_decides_for_those_that_say_nothing(refuse_late: str) -> None:
    refused = sum(owned.refused for owned in overloaded(warmed(refuse_late), ("",)))
    assert (refused > 0) is (refuse_late == "all")


def test_refused_choices_leave_nothing_and_are_refused_together() -> None:
    """Twenty requests of three choices, a third of all choices refused: all of a request or none, while none of its
    tokens is out."""
    world = of_config(11, small(PRESET), placement=lambda: Refusing(Colocated(), 5))
    random = Random(3)
    for index in range(20):
        submit_at(world, 0.2 * index, f"r{index}", Asked(tokens(random, 10), 6), choices=3)
    world.run(6.0)
    world.run_until_quiet()
    world.check_outputs()
    whole = 0
    for index in range(20):
        three = [world.owned[f"r{index}-{choice}"] for choice in range(3)]
        refused = {owned.refused for owned in three}
        assert len(refused) == 1, "the answers of all choices come together here, and so do the refusals"
        whole += refused == {False}
    assert 0 < whole < 20
