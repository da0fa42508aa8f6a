"""The preset names this system's policies; its padded path is chosen by the iteration alone."""

from __future__ import annotations

from cohort.common.config import load_config
from cohort.common.policies import compose
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.placements import Disaggregated
from cohort.common.policies.bucketserve.padded_prefill import PaddedPrefill
from cohort.common.policies.bucketserve.prefill_order import BucketedPrefill
from cohort.common.types import Role
from tests.common.machines.clusters import finish, of_config, offer, small
from tests.common.policies.bucketserve.test_in_cluster import requests


def test_the_preset_names_its_policies() -> None:
    config = load_config(preset="bucketserve")
    compose.check_names(config)
    assert isinstance(compose.prefill_order(config), BucketedPrefill)
    assert isinstance(compose.placement(config), Disaggregated)
    assert type(compose.iteration(config)) is ContinuousBatching
    assert set(config.instance_roles.values()) == {Role.PREFILL, Role.DECODE}


def test_the_padded_path_is_one_choice() -> None:
    config = load_config(preset="bucketserve", overrides={"policies": {"iteration": "padded_prefill"}})
    compose.check_names(config)
    assert isinstance(compose.iteration(config), PaddedPrefill)


def test_the_composed_order_serves_a_cluster_to_the_end() -> None:
    workers = [{"role": "prefill", "count": 2}, {"role": "decode"}]
    world = of_config(5, small("bucketserve", {"workers": workers}), blocks=40)
    offer(world, 60, requests)
    finish(world)
    assert world.manager.stats()["batches_total"] > 0
