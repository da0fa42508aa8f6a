"""The cluster as the manager shows it: its load to gateways, for admission and readiness; to policies, with the
monitor's forecast. Called by `ManagerMachine`; knows workers' reports and counts, decides nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cohort.common.messages import ClusterLoad, ClusterStats
from cohort.common.policies.interface import ClusterView, InstanceView
from cohort.common.types import InstanceId

_WINDOW_S = 1.0
_WEIGHT = 0.2
"""Of the newest window in the average."""


class DrainRate:
    """Requests finished a second, moving average; 0 until the first second with one has passed."""

    def __init__(self, now_s: float) -> None:
        self.per_s = 0.0
        self._at_s = now_s
        self._finished = 0

    def finished(self, now_s: float, total: int) -> None:
        """So many have finished in all by now."""
        passed_s = now_s - self._at_s
        if passed_s >= _WINDOW_S:
            rate = (total - self._finished) / passed_s
            self.per_s = rate if self.per_s == 0.0 else (1 - _WEIGHT) * self.per_s + _WEIGHT * rate
            self._at_s, self._finished = now_s, total


def cluster_load(
    views: Collection[InstanceView], *, ready: bool, waiting: int, waiting_tokens: int, running: int, drain_rate: float
) -> ClusterLoad:
    """`views`: of the workers that take requests."""
    return ClusterLoad(
        ready=ready and bool(views),
        instances=[view.instance for view in views],
        waiting=waiting,
        waiting_tokens=waiting_tokens,
        running=running,
        free_tokens=sum(view.capacity.geometry.positions(view.free_blocks) for view in views),
        total_tokens=sum(view.capacity.positions for view in views),
        max_model_len=max((view.capacity.max_model_len for view in views), default=0),
        drain_rate=drain_rate,
        engines=list(dict.fromkeys(view.capacity.engine for view in views if view.capacity.engine is not None)),
    )


class Forecast:
    """The monitor's last summary; none where it is silent."""

    def __init__(self) -> None:
        self._stats: ClusterStats | None = None
        self._heard_s = 0.0

    def heard(self, now_s: float, stats: ClusterStats) -> None:
        self._stats, self._heard_s = stats, now_s

    def cluster(self, now_s: float, serving: Mapping[InstanceId, InstanceView]) -> ClusterView:
        """What policies decide by. `serving`: the workers that take requests."""
        stats = self._stats
        if stats is None:
            return ClusterView(serving)
        return ClusterView(
            instances=serving,
            arrival_rate=stats.arrival_rate,
            arrival_rate_forecast=stats.arrival_rate_forecast,
            mean_prompt_tokens=stats.mean_prompt_tokens,
            mean_output_tokens=stats.mean_output_tokens,
            forecast_age_s=now_s - self._heard_s,
        )
