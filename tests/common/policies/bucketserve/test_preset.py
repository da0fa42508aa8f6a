"""The preset names this system's policies, and the two halves of the padded path only work together."""

from __future__ import annotations

import pytest

from cohort.common.config import load_config
from cohort.common.errors import ConfigError
from cohort.common.policies import compose
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.placements import Disaggregated
from cohort.common.policies.bucketserve.padded_prefill import PaddedPrefill
from cohort.common.policies.bucketserve.prefill_order import BucketedPrefill
from cohort.common.types import Role
from tests.common.machines.clusters import finish, of_config, offer, small
from tests.common.policies.bucketserve.test_in_cluster import requests


def test_the_preset_fills_the_seats() -> None:
    config = load_config(preset="bucketserve")
    compose.check_names(config)
    assert isinstance(compose.prefill_order(config), BucketedPrefill)
    assert isinstance(compose.placement(config), Disaggregated)
    assert type(compose.iteration(config)) is ContinuousBatching
    assert set(config.instance_roles.values()) == {Role.PREFILL, Role.DECODE}


def test_padding_needs_its_scheduler_and_the_scheduler_needs_padding() -> None:
    both = {"bucketserve": {"padding": "longest"}, "policies": {"iteration": "padded_prefill"}}
    config = load_config(preset="bucketserve", overrides=both)
    compose.check_names(config)
    assert isinstance(compose.iteration(config), PaddedPrefill)
    for section, options in both.items():
        with pytest.raises(ConfigError, match="go together"):
            compose.check_names(load_config(preset="bucketserve", overrides={section: options}))


def test_the_composed_order_serves_a_cluster_to_the_end() -> None:
    workers = [{"role": "prefill", "count": 2}, {"role": "decode"}]
    world = of_config(5, small("bucketserve", {"workers": workers}), blocks=40)
    offer(world, 60, requests)
    finish(world)
    assert world.manager.figures()["batches_total"] > 0
