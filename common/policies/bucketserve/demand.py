"""The global monitor's forecast applied to the next batch, and the fallback while the monitor is silent.

Read by `controller.py` for every round of batches. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from cohort.common.policies.interface import ClusterView


@dataclass(frozen=True, slots=True)
class DemandRule:
    """`default_output`: tokens expected of a response without a prediction. `horizon_s`: time whose expected online
    work an offline batch leaves room for. `max_age_s`: older forecasts are ignored. `max_share`: share of the safe
    memory that is left free at most; `blind_share`: without a forecast."""

    default_output: float
    horizon_s: float = 1.0
    max_age_s: float = 3.0
    max_share: float = 0.5
    blind_share: float = 0.2

    def known(self, cluster: ClusterView) -> bool:
        return cluster.forecast_age_s <= self.max_age_s

    def expected_output(self, cluster: ClusterView) -> float:
        """B9 · Return the tokens expected of a response without a prediction: the monitor's mean while it is fresh."""
        if self.known(cluster) and cluster.mean_output_tokens > 0.0:
            return cluster.mean_output_tokens
        return self.default_output

    def reserved_share(self, cluster: ClusterView) -> float:
        """B9 · BucketServe §III: Return the share of the safe memory that offline work must leave to online requests
        still to come: the forecast arrivals of `horizon_s`, at mean length. The paper gives no rule."""
        if not self.known(cluster):
            return self.blind_share
        views = cluster.instances.values()
        decoding = [view.capacity for view in views if view.role.decodes] or [view.capacity for view in views]
        tokens = sum(capacity.positions for capacity in decoding)
        coming = max(cluster.arrival_rate_forecast, cluster.arrival_rate) * self.horizon_s
        mean_tokens = cluster.mean_prompt_tokens + self.expected_output(cluster)
        return min(self.max_share, coming * mean_tokens / tokens) if tokens else self.blind_share
