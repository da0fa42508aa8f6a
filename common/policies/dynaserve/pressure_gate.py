"""First come, first served, but nothing is dispatched while every instance's decodes alone take longer than the bound.

A `PrefillOrder` of the manager. While some instances have room, the placement avoids the others. Requests that wait
here fill the gateway's waiting bounds, so its admission refuses in time.
"""

from __future__ import annotations

from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.interface import ClusterView, Dispatch, InstanceView
from cohort.common.policies.settings import DynaServeSettings
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import InstanceId, WorkerStats


class PressureGate(Fcfs):
    """D5 · Gate for decodes that exceed the bound alone, on which the paper is silent: only fewer decodes help.
    `tbt_slo_s`, `headroom` as in `SloBatching`."""

    wants_step_times = True
    reads_queues = True

    def __init__(self, options: DynaServeSettings, *, dispatch_ahead_tokens: int) -> None:
        super().__init__(dispatch_ahead_tokens=dispatch_ahead_tokens)
        self._within_s = options.tbt_slo_s * (1.0 - options.headroom)
        self._held_back = 0
        self._known: dict[InstanceId, tuple[WorkerStats, int, int]] = {}
        """Last report of each instance, with the number and context of its decodes."""

    def decide(self, now_s: float, cluster: ClusterView) -> list[Dispatch]:
        if not len(self):
            return []
        views = [view for view in cluster.instances.values() if view.role.decodes]
        if views and all(self._pressed(view) for view in views):
            self._held_back += 1
            return []
        return super().decide(now_s, cluster)

    def _pressed(self, view: InstanceView) -> bool:
        """Return whether an iteration of the instance's decodes takes longer than the bound."""
        stats = view.stats
        if stats.step_times is None:
            return False
        known = self._known.get(view.instance)
        if known is None or known[0] is not stats:
            contexts = [work.context for work in stats.queue if work.prefill_left == 0 and work.decode_left > 0]
            known = self._known[view.instance] = (stats, len(contexts), sum(contexts))
        rows, context = known[1] + view.assigned_requests, known[2] + view.assigned_context_tokens
        return rows > 0 and step_seconds(stats.step_times, BatchShape.of_decodes(rows, context)) > self._within_s

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "held_back_total": float(self._held_back)}
