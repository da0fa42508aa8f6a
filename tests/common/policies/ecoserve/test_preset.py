"""Every option reaches the policies of the preset."""

from __future__ import annotations

from cohort.common.config import load_config
from cohort.common.policies import compose
from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.ecoserve.time_synced import TimeSynced
from cohort.common.policies.settings import EcoServeSettings, placed


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
