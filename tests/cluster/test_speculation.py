"""Drafted tokens under every preset: the answers are those without, whatever breaks, and every machine replays."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cohort.common.machines.replayer import replay
from tests.cluster.cases import Case, cases, every_second, every_third, left_by_clients
from tests.common.machines.clusters import total
from tests.common.machines.recorded_world import RecordedWorld
from tests.common.machines.world import World
from tests.examples import of_worlds
from tests.support.kinds import by_default


def _spread(preset: str, seed: int, blocks: int) -> Case:
    """Few requests at a time, so that drafts are worth their time, of which some come together."""
    return left_by_clients(
        preset, seed, blocks, shortest=8, arrival_s=lambda index, share: 0.2 * (index // 2) + 0.02 * share
    )


def _counted(world: World) -> Counter[str]:
    seen: Counter[str] = Counter(planned_ahead=total(world, "planned_ahead"), steps=total(world, "steps"))
    for node in world.workers.values():
        counters = node.worker.counters
        for name in ("drafted_rows", "drafted_tokens", "accepted_tokens"):
            seen[name] += sum(getattr(counters, name).values())
    return seen


@pytest.mark.parametrize("preset", every_second(1))
def test_answers_are_those_without_and_take_fewer_steps(preset: str) -> None:
    """The world compares every token with what is expected, and each engine every slot that a row reads."""
    seen, without = Counter[str](), Counter[str]()
    for seed, blocks in ((1, 64), (2, 24)):
        seen += _counted(_spread(preset, seed, blocks).live(acceptance=0.8))
        without += _counted(_spread(preset, seed, blocks).live())
    assert seen["accepted_tokens"] > 50 and without["drafted_tokens"] == 0
    assert seen["accepted_tokens"] < seen["drafted_tokens"]
    assert seen["steps"] < without["steps"]


@pytest.mark.parametrize("preset", every_third(1))
def test_tokens_are_right_whatever_breaks(preset: str) -> None:
    @of_worlds(0.03)
    @given(case=cases(preset), acceptance=st.sampled_from([0.3, 0.8, 1.0]))
    def check(case: Case, acceptance: float) -> None:
        case.live(acceptance=acceptance)

    check()


@pytest.mark.parametrize("preset", by_default(["cohort", "bros", "dynaserve"], "cohort"))
def test_drafts_replay(preset: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        case = _spread(preset, 3, 30)
        world = case.live(RecordedWorld, recording=(case.config, Path(folder)), acceptance=0.8)
        assert isinstance(world, RecordedWorld)
        assert _counted(world)["accepted_tokens"] > 20
        for path in world.close():
            found = replay(path)
            assert found.difference == "", f"{found.machine} {found.instance}: {found.difference}"
