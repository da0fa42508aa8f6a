"""EcoServe in the virtual cluster: predictors wrong on purpose, small caches, kills, segments that meet anywhere.

The world checks every slot of KV, so a token in somebody else's lent block fails at once; outputs equal the expected.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from cohort.common.config import load_config
from cohort.common.messages import RevisePrediction
from cohort.common.policies import compose
from cohort.common.policies.baselines.placements import Colocated, Disaggregated
from cohort.common.policies.interface import Placement
from cohort.common.types import Prediction, Role
from tests.common.machines.faults import any_faults
from tests.common.machines.world import VOCABULARY, SplitAnywhere, World, expected_output
from tests.common.policies.baselines.test_in_cluster import PD_TWICE, UNIFIED, finish, preemptions

WRONG = ("one", "max", "random", "right")
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "D": {"synced": False, "ordered": False, "pipelined": False},
    "SD": {"ordered": False, "pipelined": False},
    "SDO": {"pipelined": False},
    "coupled": {"decoupled": False, "ordered": False, "pipelined": False},
    "unsynced, pipelined": {"synced": False},
    "forecast": {"lending": "forecast"},
    "unsynced, forecast": {"lending": "forecast", "synced": False},
}


def world(
    seed: int,
    *,
    roles: dict[str, Role] = UNIFIED,
    placement: Callable[[], Placement] = Colocated,
    blocks: int = 40,
    host_blocks: int = 30,
    preemption: str = "swap",
    caching: bool = True,
    allocation: str = "nested",
    failures: float = 0.0,
    **options: Any,
) -> World:
    config = load_config(
        preset="ecoserve",
        overrides={
            "policies": {"allocation": allocation},
            "engine": {"max_rows": 8, "max_step_tokens": 32, "preemption": preemption},
            "ecoserve": {"group_tokens": 4, "waiting_share": 0.3, "patience_s": 2.0, **options},
            "kv": {"prefix_caching": caching},
        },
    )
    return World(
        seed,
        roles,
        placement,
        blocks=blocks,
        host_blocks=host_blocks,
        run_failure_rate=failures,
        scheduler=lambda: compose.iteration(config),
        allocator=lambda geometry, device, host: compose.allocation(config, geometry, device, host),
    )


def offer(world: World, count: int, kind: str) -> None:
    random = Random(world.random.getrandbits(32))
    for index in range(count):
        prompt = [random.randrange(VOCABULARY) for _ in range(random.randint(1, 30))]
        tokens = random.randint(1, 40)
        predicted = {
            "one": 1.0,
            "max": 40.0,
            "random": float(random.randint(1, 60)),
            "right": float(len(expected_output(prompt, tokens))),
        }[kind]
        world.at(random.random() * 2.0, partial(world.submit, f"r{index}", prompt, tokens, "rt", predicted))


def figure(world: World, name: str) -> float:
    return sum(node.machine.scheduler.figures()[name] for node in world.workers.values())


@pytest.mark.parametrize("blocks", [18, 40])
@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_prediction_costs_time_and_never_an_answer(kind: str, blocks: int) -> None:
    cluster = world(31, blocks=blocks)
    offer(cluster, 45, kind)
    finish(cluster)
    assert cluster.displaced == 0
    if kind == "one":
        assert figure(cluster, "underpredictions_stopped_total") > 0
    if kind == "right":
        assert figure(cluster, "underpredictions_stopped_total") == 0
        if blocks == 40:
            assert preemptions(cluster) == 0
    assert figure(cluster, "borrowers_total") > 0
    assert figure(cluster, "formations_total") < figure(cluster, "iterations_total")


def test_late_borrowers_leave_and_come_back() -> None:
    late = 0.0
    for seed in range(3):
        cluster = world(seed, blocks=24, buffer=0.0, host_blocks=60)
        offer(cluster, 45, "random")
        finish(cluster)
        late += figure(cluster, "borrowers_late_total")
    assert late > 5


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: str) -> None:
    cluster = world(33, blocks=26, **VARIANTS[variant])
    offer(cluster, 45, "random")
    finish(cluster)
    assert (figure(cluster, "borrowers_total") > 0) == ("pipelined" in variant or variant == "full")


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_forecast_costs_time_and_never_an_answer(kind: str) -> None:
    cluster = world(35, blocks=18, lending="forecast")
    offer(cluster, 45, kind)
    finish(cluster)
    assert cluster.displaced == 0
    evicted = figure(cluster, "borrowers_late_total")
    assert (evicted > 0) == (kind in ("one", "random"))  # who is promised too much never runs out


@pytest.mark.parametrize("lending", ["halves", "forecast"])
def test_predictions_that_arrive_late(lending: str) -> None:
    cluster = world(34, blocks=30, lending=lending)
    offer(cluster, 45, "one")
    for index in range(45):
        revised = RevisePrediction(f"r{index}", Prediction(20.0, 20.0, 20.0, 20.0))
        cluster.at(2.1 + 0.01 * index, partial(cluster.post, "manager", "unified-0", revised))
    finish(cluster)


def test_prefill_and_decode_apart() -> None:
    cluster = world(35, roles=PD_TWICE, placement=Disaggregated)
    offer(cluster, 50, "random")
    finish(cluster)
    assert sum(node.machine.counters.transfers_in for node in cluster.workers.values()) > 25


@settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a world shrinks slowly
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    seed=st.integers(0, 2**32),
    kind=st.sampled_from(WRONG),
    variant=st.sampled_from(sorted(VARIANTS)),
    placement=st.sampled_from([Colocated, Disaggregated, SplitAnywhere]),
    allocation=st.sampled_from(["nested", "nested", "paged", "predicted"]),
    preemption=st.sampled_from(["swap", "recompute"]),
    blocks=st.sampled_from([20, 30, 64]),
    host=st.sampled_from([0, 6, 60]),
    caching=st.booleans(),
    failures=st.sampled_from([0.0, 0.1]),
    faults=any_faults(),
)
def test_anything_may_break_at_any_time(
    seed: int,
    kind: str,
    variant: str,
    placement: Callable[[], Placement],
    allocation: str,
    preemption: str,
    blocks: int,
    host: int,
    caching: bool,
    failures: float,
    faults: list[tuple[str, float, float]],
) -> None:
    cluster = world(
        seed,
        roles=PD_TWICE,
        placement=placement,
        allocation=allocation,
        preemption=preemption,
        host_blocks=host,
        blocks=max(64, blocks) if placement is SplitAnywhere else blocks,
        caching=caching,
        failures=failures,
        **VARIANTS[variant],
    )
    offer(cluster, 25, kind)
    for fault, at_s, back_s in faults:
        cluster.at(at_s, partial(cluster.inflict, fault, back_s))
    cluster.run(6.0)
    cluster.run_until_quiet()
    cluster.check_outputs()
