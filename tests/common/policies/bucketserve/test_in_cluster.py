"""BucketServe's order in the virtual cluster: two prefill and two decode workers, small caches, kills, cancellations.

The world checks every slot of KV; here also that the manager's batches arrive as batches and nothing is left.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

import pytest

from cohort.common.machines.effects import WorkerEffect
from cohort.common.machines.events import Received, WorkerEvent
from cohort.common.machines.worker.worker import WorkerMachine
from cohort.common.messages import StartSegment
from cohort.common.policies.baselines.placements import Colocated, Disaggregated
from cohort.common.policies.bucketserve.prefill_order import BucketedPrefill
from cohort.common.policies.interface import Placement
from cohort.common.policies.settings import BucketServeSettings
from cohort.common.types import Role
from tests.common.machines.clusters import PD_TWICE, UNIFIED_TWICE, Asked, finish, offer, tokens
from tests.common.machines.world import World
from tests.common.policies.bucketserve.cluster import controller, demand_rule
from tests.support.kinds import in_turn


def buckets() -> BucketedPrefill:
    return BucketedPrefill(
        BucketServeSettings(),
        controller(max_batch=6, ahead=64, demand=demand_rule(blind_share=0.1, default_output=12.0)),
    )


def requests(random: Random) -> Iterator[Asked]:
    """Three in ten are long."""
    while True:
        long = random.random() < 0.3
        prompt = tokens(random, random.randint(40, 60) if long else random.randint(1, 9))
        yield Asked(prompt, random.randint(1, 30))


@pytest.mark.parametrize(
    ("blocks", "roles", "placement"),
    in_turn(
        [
            (blocks, *placed)
            for blocks in (24, 40, 64)
            for placed in ((PD_TWICE, Disaggregated), (UNIFIED_TWICE, Colocated))
        ],
        of=2,
    ),
)
def test_undisturbed_also_with_little_memory(roles: dict[str, Role], placement: type[Placement], blocks: int) -> None:
    world = World(11, roles, placement, blocks=blocks, order=buckets)
    offer(world, 70, requests)
    finish(world)
    assert world.attempts_lost == 0
    stats = world.manager.stats()
    assert stats["batches_total"] > 0
    assert stats["bucket_splits_total"] > 0


def test_batches_stay_together_on_their_way_to_a_prefill_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, set[str]] = {}
    sizes: dict[int, int] = {}
    handle = WorkerMachine.handle

    def spy(machine: WorkerMachine, now_s: float, *events: WorkerEvent) -> list[WorkerEffect]:
        for event in events:
            match event:
                case Received(message=StartSegment(index=0, batch_id=batch_id)):
                    seen.setdefault(batch_id, set()).add(machine.setup.instance)
                    sizes[batch_id] = sizes.get(batch_id, 0) + 1
                case _:
                    pass
        return handle(machine, now_s, *events)

    monkeypatch.setattr(WorkerMachine, "handle", spy)
    world = World(12, PD_TWICE, Disaggregated, order=buckets)
    offer(world, 70, requests)
    finish(world)
    assert all(len(workers) == 1 for workers in seen.values())
    assert {worker for workers in seen.values() for worker in workers} == {"prefill-0", "prefill-1"}
    assert max(sizes.values()) > 2


def test_a_request_that_fits_nowhere_is_refused_and_blocks_no_other() -> None:
    world = World(31, PD_TWICE, Disaggregated, blocks=8, order=buckets)
    world.run(3.0)
    world.submit("big", [1] * 40, 30)
    world.submit("small", [1] * 10, 5)
    world.run_until_quiet()
    assert world.owned["big"].refused
    assert world.owned["small"].finish is not None
    world.check_outputs()
