"""The preset names this system's policies, and every option reaches them."""

from __future__ import annotations

from cohort.common.config import load_config
from cohort.common.policies import compose
from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.baselines.placements import Colocated
from cohort.common.policies.ecoserve.nested_allocation import NestedAllocator
from cohort.common.policies.ecoserve.time_synced import TimeSynced
from cohort.common.policies.settings import EcoServeSettings, placed
from cohort.common.types import Role
from tests.common.policies.baselines.drive import GEOMETRY


def test_the_preset_names_its_policies() -> None:
    config = load_config(preset="ecoserve")
    compose.check_names(config)
    assert isinstance(compose.placement(config), Colocated)
    assert isinstance(compose.iteration(config), TimeSynced)
    assert isinstance(compose.allocation(config, GEOMETRY, 8, 2), NestedAllocator)
    assert set(config.instance_roles.values()) == {Role.UNIFIED}


def test_options_arrive() -> None:
    config = load_config(
        preset="ecoserve",
        overrides=placed(
            {
                "engine": {
                    "max_rows": 5,
                    "max_step_tokens": 512,
                    "preemption": "recompute",
                    "target_forward_tokens": 4096,
                },
                "ecoserve": {"padding": 0.3, "reserve": 0.5, "synced": False},
            }
        ),
    )
    policy = compose.iteration(config)
    assert isinstance(policy, TimeSynced)
    assert policy.limits == IterationLimits(5, 512, 512, "recompute")  # no more than a step may have
    assert policy.options == EcoServeSettings(padding=0.3, reserve=0.5, synced=False)
    assert policy.metrics()["padding_ratio"] == 0.3
