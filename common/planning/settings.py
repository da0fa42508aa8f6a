"""Section `planner` of the configuration as the machine wants it. Called by both hosts."""

from __future__ import annotations

from cohort.common.config import Config
from cohort.common.planning.machine import PlannerSettings
from cohort.common.planning.shape import Bounds, Kind, Shape
from cohort.common.policies.settings import PlannerPace, settings_of


def planner_settings(config: Config, *, cores: int = 0, kinds: tuple[Kind, ...] = ()) -> PlannerSettings:
    """Make the machine's settings from section `planner`. `cores` that the workers share; 0 where each has its own
    device. `kinds` of workers that can be ordered; empty: any."""
    planner, present = config.planner, configured_shape(config)
    pace = settings_of(config, PlannerPace)
    degrees = tuple(sorted({group.degree for group in config.workers}))
    most = planner.max_workers or present.workers
    return PlannerSettings(
        mode=planner.mode,
        interval_s=pace.interval_s,
        window_s=max(pace.window_s, planner.settle_s),
        max_requests=pace.max_requests,
        cpu_share=planner.cpu_share,
        settle_s=planner.settle_s,
        worker_cost=planner.worker_cost,
        confirmations=pace.confirmations,
        bounds=Bounds(min(planner.min_workers, most), most, planner.shapes, degrees, kinds=kinds),
        default_output=config.gateway.default_prediction_tokens,
        cores=(planner.cores or cores) if cores else 0,
        threads=max((group.threads for group in config.workers), default=0) or config.default_threads(cores or 1),
    )


def configured_shape(config: Config) -> Shape:
    counts: dict[Kind, int] = {}
    for instance, role in config.instance_roles.items():
        kind = (role, config.worker_group(instance).degree)
        counts[kind] = counts.get(kind, 0) + 1
    return Shape.of(counts)
