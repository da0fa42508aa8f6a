"""The next step planned while one runs, and not: every preset samples the same tokens, whatever ends meanwhile."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given

from cohort.common.machines.effects import StartStep
from cohort.common.types import FinishReason
from cohort.common.virtual_cluster.plugins import WorkerNode
from tests.cluster.cases import Arrival, Case, cases, every_second, every_third, left_by_clients
from tests.common.machines.clusters import total
from tests.common.machines.digest_engine import DigestEngine
from tests.common.machines.world import World
from tests.examples import of_worlds
from tests.support.kinds import by_default


def _ended(world: World) -> dict[str, tuple[list[int], FinishReason | None]]:
    """What clients got of requests that came to their own end. The world has compared it with what is expected; one
    that is cancelled has come further in one life than in the other."""
    return {name: (one.tokens, one.finish) for name, one in world.owned.items() if one.finish and not one.cancelled}


def _both(case: Case) -> tuple[World, World]:
    ahead, after = case.live(), case.live(plan_ahead=False)
    assert total(after, "planned_ahead") == 0
    one, other = _ended(ahead), _ended(after)
    assert {name: one[name] for name in other if name in one} == {name: other[name] for name in one if name in other}
    return ahead, after


def _busy(preset: str, seed: int, blocks: int) -> Case:
    """Arrivals that a small cache cannot hold at once."""
    return left_by_clients(preset, seed, blocks, shortest=5, arrival_s=lambda index, share: 1.5 * share)


@pytest.mark.parametrize("preset", every_second(0))
def test_steps_are_planned_ahead_and_tokens_are_the_same(preset: str) -> None:
    seen: Counter[str] = Counter()
    for seed, blocks in ((1, 64), (2, 20)):
        ahead, after = _both(_busy(preset, seed, blocks))
        assert len(_ended(ahead)) > 15
        assert _ended(ahead).keys() >= _ended(after).keys() - {name for name, o in ahead.owned.items() if o.cancelled}
        for counter in ("steps", "planned_ahead", "wasted_rows", "preemptions"):
            seen[counter] += total(ahead, counter)
        for node in ahead.workers.values():
            seen["stop"] += node.worker.counters.finished.get("stop", 0)
    assert seen["planned_ahead"] > seen["steps"] / 20, seen
    assert seen["wasted_rows"] > 0, "rows of sequences that ended with the step before"
    assert seen["stop"] > 5


@pytest.mark.parametrize(
    "preset",
    by_default(
        ["alignedserve", "baseline-chunked-prefill", "bucketserve", "disaggregated", "unified"],
        *("baseline-chunked-prefill", "disaggregated"),
    ),
)
def test_chunks_of_prompts_follow_each_other_where_counts_size_them(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = 0
    begin = DigestEngine.begin

    def counted(self: DigestEngine, node: WorkerNode, step: StartStep) -> None:
        nonlocal chunks
        chunks += step.ahead and any(row.count > 1 for row in step.plan.rows)
        begin(self, node, step)

    monkeypatch.setattr(DigestEngine, "begin", counted)
    random = Random(4)
    arrivals: list[Arrival] = [
        (0.28 * index, random.randint(34, 40), index % 2 == 0, random.randint(5, 20), "rt", 1.0) for index in range(20)
    ]
    ahead, _ = _both(Case(preset=preset, arrivals=arrivals, seed=4, delay_s=0.002))
    refused = sum(node.worker.counters.not_ahead.get("prompts", 0) for node in ahead.workers.values())
    assert chunks > 5 and refused < chunks / 5, (chunks, refused)


@pytest.mark.parametrize("preset", every_third(0))
def test_tokens_are_the_same_whatever_breaks(preset: str) -> None:
    @of_worlds(0.03)
    @given(case=cases(preset))
    def check(case: Case) -> None:
        _both(case)

    check()
