"""Every baseline in the virtual cluster: small caches, KV transfers at any position; outputs equal the expected.

The world checks every slot of KV, every plan and every allocator; here also that what each policy is about happened.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count, product
from random import Random

import pytest

from cohort.common.policies.baselines.placements import Colocated, ColocatedInTurn, Disaggregated
from cohort.common.policies.interface import Placement
from cohort.common.types import Role
from tests.common.machines.clusters import (
    PD_TWICE,
    UNIFIED,
    UNIFIED_TWICE,
    Asked,
    finish,
    of_config,
    offer,
    small,
    tokens,
    total,
)
from tests.common.machines.world import SplitAnywhere, World
from tests.support.kinds import by_default

BASELINES = {
    "orca": "max",
    "srtf": "max",
    "mlfq": "max",
    "vllm": "paged",
    "chunked_prefill": "paged",
    "round_robin": "paged",
    "multires": "predicted",
    "predicted_batches": "predicted",
}
LARGEST = 70  # positions of the largest request offered: 18 blocks


def world(
    seed: int,
    roles: dict[str, Role],
    placement: Callable[[], Placement],
    name: str,
    *,
    allocation: str = "",
    blocks: int = 64,
    host_blocks: int = 30,
    preemption: str = "recompute",
    caching: bool = False,
    padded: bool = False,
) -> World:
    config = small(
        "",
        {
            "policies": {"iteration": name, "allocation": allocation or BASELINES[name]},
            "engine": {"preemption": preemption},
            "baselines": {"padded": padded},
            "kv": {"prefix_caching": caching},
        },
    )
    return of_config(seed, config, roles, placement, blocks=blocks, host_blocks=host_blocks)


def requests(random: Random) -> Iterator[Asked]:
    """Some share a prefix; predictions are wrong in both directions."""
    prefix = tokens(random, 9)
    for index in count():
        prompt = (prefix if random.random() < 0.3 else []) + tokens(random, random.randint(1, 31))
        most = random.randint(1, LARGEST - len(prompt)) if random.random() < 0.3 else random.randint(1, 12)
        predicted = max(1.0, most * random.choice([0.3, 1.0, 2.0]))
        yield Asked(prompt, most, "be" if index % 3 else "rt", predicted)


PREEMPTION = ("swap", "recompute")


@pytest.mark.parametrize(
    ("name", "preemption", "blocks"),
    by_default(
        product(BASELINES, PREEMPTION, (20, 64)),
        *((name, PREEMPTION[place % 2], 20) for place, name in enumerate(BASELINES)),
        ("orca", "swap", 64),
    ),
)
def test_colocated(name: str, preemption: str, blocks: int) -> None:
    cluster = world(21, UNIFIED, Colocated, name, blocks=blocks, preemption=preemption)
    offer(cluster, 50, requests)
    finish(cluster)
    assert cluster.attempts_lost == 0
    if blocks == 64 and name == "orca":
        assert total(cluster, "preemptions") == 0  # max-allocation never runs out
    if blocks == 20 and name in ("vllm", "chunked_prefill", "round_robin", "srtf", "mlfq"):
        assert total(cluster, "preemptions") > 0


@pytest.mark.parametrize("name", BASELINES)
def test_segments_may_meet_anywhere(name: str) -> None:
    # Not tighter: two workers whose caches are full of granted and of leaving KV may wait for each other, whichever
    # scheduler they have (first come, first served as well).
    cluster = world(22, UNIFIED_TWICE, lambda: SplitAnywhere(22), name, blocks=64, caching=True)
    offer(cluster, 50, requests)
    finish(cluster)
    assert total(cluster, "transfers_in") > 5


def test_padded_batches_write_behind_their_rows_and_harm_no_block() -> None:
    cluster = world(23, UNIFIED, Colocated, "predicted_batches", blocks=40, padded=True)
    offer(cluster, 50, requests)
    finish(cluster)


def test_vllm_prefills_and_decodes_apart_on_workers_of_their_own() -> None:
    cluster = world(24, PD_TWICE, Disaggregated, "vllm", blocks=40, preemption="swap")
    offer(cluster, 60, requests)
    finish(cluster)
    assert total(cluster, "transfers_in") > 30


def test_requests_go_to_instances_in_turn() -> None:
    cluster = world(25, UNIFIED_TWICE, ColocatedInTurn, "chunked_prefill")
    offer(cluster, 40, requests)
    finish(cluster)
    counts = [sum(node.machine.counters.finished.values()) for node in cluster.workers.values()]
    assert counts == [20, 20]
