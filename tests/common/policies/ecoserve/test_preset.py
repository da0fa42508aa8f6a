"""The preset names this system's policies, and every option reaches them."""

from __future__ import annotations

from cohort.common.config import load_config
from cohort.common.policies import compose
from cohort.common.policies.baselines.placements import Colocated
from cohort.common.policies.ecoserve.nested_allocation import NestedAllocator
from cohort.common.policies.ecoserve.task_order import Ranges
from cohort.common.policies.ecoserve.time_synced import TimeSynced
from cohort.common.types import Role
from tests.common.policies.baselines.drive import GEOMETRY


def test_the_preset_fills_the_seats() -> None:
    config = load_config(preset="ecoserve")
    compose.check_names(config)
    assert isinstance(compose.placement(config), Colocated)
    assert isinstance(compose.iteration(config), TimeSynced)
    assert isinstance(compose.allocation(config, GEOMETRY, 8, 2), NestedAllocator)
    assert set(config.instance_roles.values()) == {Role.UNIFIED}


def test_options_arrive() -> None:
    config = load_config(
        preset="ecoserve",
        overrides={
            "engine": {"max_rows": 5, "max_step_tokens": 512, "preemption": "recompute"},
            "ecoserve": {
                "target_forward_tokens": 4096,
                "reserve": 0.5,
                "waiting_share": 0.4,
                "padding": 0.3,
                "buffer": 0.2,
                "group_tokens": 3,
                "slo_scale": 7.0,
                "deadline_ranges_s": [1.0],
                "overdue_range_s": 9.0,
                "occupied_range_tokens": 4,
                "patience_s": 6.0,
                "decoupled": False,
                "synced": False,
                "ordered": False,
                "pipelined": False,
            },
        },
    )
    policy = compose.iteration(config)
    assert isinstance(policy, TimeSynced)
    settings = policy.settings
    assert (settings.max_rows, settings.target_tokens) == (5, 512)  # no more than a step may have
    assert (settings.reserve, settings.waiting_share, settings.buffer, settings.group_tokens) == (0.5, 0.4, 0.2, 3)
    assert (settings.slo_scale, settings.patience_s, settings.preemption) == (7.0, 6.0, "recompute")
    assert settings.ranges == Ranges((1.0,), 9.0, 4)
    assert not (settings.decoupled or settings.synced or settings.ordered or settings.pipelined)
    assert policy.metrics()["padding_ratio"] == 0.3
