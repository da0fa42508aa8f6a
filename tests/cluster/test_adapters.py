"""Requests of several LoRA adapters through whole clusters: every answer is its adapter's, whatever breaks.

The digest engine's KV depends on the adapter, so a block that is shared, moved or resumed across adapters fails at its
first read, and so does a row whose adapter is not held.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cohort.common.config import CONFIGS_DIR
from cohort.common.policies.baselines.placements import Colocated, Disaggregated
from cohort.common.types import Role
from tests.common.machines import clusters
from tests.common.machines.clusters import PD_TWICE, UNIFIED, UNIFIED_TWICE, Asked, finish, small, strike, tokens, total
from tests.common.machines.faults import Fault, any_faults
from tests.common.machines.world import SplitAnywhere, World
from tests.examples import of_worlds
from tests.support.kinds import by_default, in_turn

PRESETS = sorted(path.stem for path in (CONFIGS_DIR / "presets").glob("*.yaml"))


def requests(random: Random) -> Iterator[Asked]:
    """Of the base and four adapters, half with one prefix that all of them share."""
    prefix = tokens(random, 12)
    while True:
        prompt = (prefix if random.random() < 0.5 else []) + tokens(random, random.randint(1, 24))
        adapter = random.choice(["", "one", "two", "three", "four"])
        yield Asked(prompt, random.randint(1, 16), adapter=adapter)


@pytest.mark.parametrize(("preset", "max_loras"), in_turn(product(PRESETS, (1, 2, 8)), of=3))
def test_every_preset_serves_adapters(preset: str, max_loras: int) -> None:
    world = clusters.of_config(3, small(preset), max_loras=max_loras)
    clusters.offer(world, 40, requests)
    finish(world)
    loads, workers = total(world, "adapter_loads"), len(world.workers)
    assert loads >= 4
    if max_loras == 8:
        assert loads <= 4 * workers, "each once a worker"


@pytest.mark.parametrize(
    ("seed", "max_loras", "preemption"),
    by_default(
        product(range(3), (1, 3), ("swap", "recompute")),
        *((0, 1, "swap"), (1, 3, "swap"), (2, 1, "recompute"), (0, 3, "recompute")),
    ),
)
def test_split_requests_meet_anywhere_in_a_tight_cache(seed: int, max_loras: int, preemption: str) -> None:
    world = World(
        seed,
        PD_TWICE,
        lambda: SplitAnywhere(seed),
        blocks=24,
        host_blocks=60,
        preemption=preemption,
        max_loras=max_loras,
    )
    clusters.offer(world, 60, requests)
    finish(world)
    assert total(world, "transfers_in") > 10
    assert total(world, "preemptions") > 0


@pytest.mark.parametrize(("roles", "placement"), [(UNIFIED, Colocated), (PD_TWICE, Disaggregated)])
def test_prefixes_are_found_within_an_adapter(roles: dict[str, Role], placement: type[Colocated]) -> None:
    world = World(2, roles, placement, max_loras=4)
    clusters.offer(world, 60, requests)
    finish(world)
    assert sum(node.machine.kv.metrics()["prefix_hits_total"] for node in world.workers.values()) > 0


def test_placement_gathers_an_adapters_requests() -> None:
    """Two workers, two adapters, little load: neither adapter needs both workers."""
    for preset in ("cohort", "unified"):
        world = clusters.of_config(4, small(preset), UNIFIED_TWICE, max_loras=1)
        for index in range(20):
            asked = Asked(tokens(world.random, 8), 4, adapter="one" if index % 2 else "two")
            clusters.submit_at(world, 0.5 + 0.3 * index, f"r{index}", asked)
        finish(world, 8.0)
        assert total(world, "adapter_loads") <= 4, preset


@given(st.integers(0, 10_000), any_faults(sorted(PD_TWICE)), st.sampled_from([1, 2]))
@example(8726, [("leave", 1.867, 3.4), ("drain decode-0", 1.885, 1.449)], 1).via(
    "what left a draining worker while it waited for its adapter entered that worker's scheduler"
)
@of_worlds(0.25)
def test_whatever_breaks_every_answer_is_its_adapters(seed: int, faults: list[Fault], max_loras: int) -> None:
    world = World(seed, PD_TWICE, lambda: SplitAnywhere(seed), blocks=40, max_loras=max_loras, loss_rate=0.02)
    clusters.offer(world, 30, requests)
    strike(world, faults)
    finish(world)
