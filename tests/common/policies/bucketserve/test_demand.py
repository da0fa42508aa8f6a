"""What the monitor's forecast changes, and what happens when it says nothing (B9)."""

from __future__ import annotations

import pytest

from cohort.common.types import Role
from tests.common.policies.bucketserve.cluster import cluster, demand_rule, view

WORKERS = (view("p0", Role.PREFILL), view("d0", Role.DECODE, blocks=250))  # 1,000 tokens of KV


def test_expected_online_work_is_kept_free() -> None:
    seen = cluster(
        *WORKERS,
        arrival_rate=1.0,
        arrival_rate_forecast=2.0,
        mean_prompt_tokens=60.0,
        mean_output_tokens=40.0,
        forecast_age_s=0.5,
    )
    # Two requests a second for a second, 100 tokens each, of 1,000 tokens
    assert demand_rule().reserved_share(seen) == pytest.approx(0.2)
    assert demand_rule(horizon_s=60.0).reserved_share(seen) == 0.5  # never more than half
    assert demand_rule().expected_output(seen) == 40.0


def test_where_no_decode_worker_lives_those_that_stand_in_keep_the_memory_free() -> None:
    (stand_in,) = (view("p0", Role.PREFILL, blocks=250),)
    seen = cluster(
        stand_in, arrival_rate_forecast=1.0, mean_prompt_tokens=60.0, mean_output_tokens=40.0, forecast_age_s=0.5
    )
    assert demand_rule().reserved_share(seen) == pytest.approx(0.1)


def test_a_silent_monitor_is_neither_believed_nor_waited_for() -> None:
    old = cluster(*WORKERS, arrival_rate_forecast=50.0, mean_output_tokens=900.0, forecast_age_s=3.5)
    never = cluster(*WORKERS)
    for seen in (old, never):
        assert demand_rule().reserved_share(seen) == 0.2
        assert demand_rule().expected_output(seen) == 8.0


def test_a_monitor_without_finished_requests_knows_no_mean() -> None:
    assert demand_rule().expected_output(cluster(*WORKERS, forecast_age_s=0.1)) == 8.0
