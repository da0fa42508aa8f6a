"""The placement's forecast beside BROS: it goes by the order of the packing."""

from __future__ import annotations

from cohort.common.config import load_config
from cohort.common.policies import compose
from cohort.common.policies.interface import Placed
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from tests.common.policies.cohort.test_least_ttft import SLOW, asked, cluster, prompt, report, worker


def test_with_the_packing_by_slack_prompts_on_time_go_by_due_time_and_late_ones_behind_them() -> None:
    def forecast(ttft_s: float) -> float:
        policy = compose.placement(load_config(preset="bros", overrides={"policies": {"placement": "least_ttft"}}))
        view = worker("a")
        policy.place(0.0, asked("before", 6000, ttft_s=ttft_s), cluster(view), None)
        view.stats = report(prompt("before", 6000))
        placed = policy.place(1.0, asked("new", 100, ttft_s=20.0), cluster(view), None)
        assert isinstance(placed, Placed)
        return placed.estimated_s

    alone_s = step_seconds(SLOW, BatchShape(6000, 1, 18_000_000, 0, 0))
    assert forecast(0.4) < 0.5 * alone_s, "it is late by now"
    assert forecast(19.0) > 0.9 * alone_s, "due earlier, however much longer"
    assert forecast(30.0) < 0.5 * alone_s
