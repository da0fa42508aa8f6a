"""First come, first served, but nothing goes out while every instance's decodes alone take longer than their bound.

A `PrefillOrder` of the manager: the admission half of what happens when decodes exceed the bound by themselves (the
other half is the placement, which avoids such instances while there are others). Requests kept here fill the
gateway's waiting bounds, so that its admission refuses in time.
"""

from __future__ import annotations

from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.dynaserve.instance_work import decoding
from cohort.common.policies.interface import ClusterView, Dispatch, InstanceView
from cohort.common.policies.settings import DynaServeSettings
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import InstanceId, WorkerStats


class PressureGate(Fcfs):
    """D5 · decodes have no room left under the bound: no prefill budget is the answer to that, only fewer decodes.

    `tbt_slo_s`, `headroom` as in `SloBatching`. Differs from the paper: it says nothing of this case.
    """

    wants_step_times = True
    reads_queues = True

    def __init__(self, options: DynaServeSettings, *, dispatch_ahead_tokens: int) -> None:
        super().__init__(dispatch_ahead_tokens=dispatch_ahead_tokens)
        self._within_s = options.tbt_slo_s * (1.0 - options.headroom)
        self._held_back = 0
        self._known: dict[InstanceId, tuple[WorkerStats, int, int]] = {}
        """Per instance the last report seen, and its decodes; counted once per report, however often this is asked."""

    def decide(self, now_s: float, cluster: ClusterView) -> list[Dispatch]:
        if not len(self):
            return []
        views = [view for view in cluster.instances.values() if view.role.decodes]
        if views and all(self._pressed(view) for view in views):
            self._held_back += 1
            return []
        return super().decide(now_s, cluster)

    def _pressed(self, view: InstanceView) -> bool:
        """An iteration of what decodes there takes longer than the bound; an instance without decodes never."""
        stats = view.stats
        if stats.step_times is None:
            return False
        known = self._known.get(view.instance)
        if known is None or known[0] is not stats:
            known = self._known[view.instance] = (stats, *decoding(stats))
        rows, context = known[1] + view.assigned_requests, known[2] + view.assigned_context_tokens
        return rows > 0 and step_seconds(stats.step_times, BatchShape(0, 0, 0, rows, context)) > self._within_s

    def metrics(self) -> dict[str, float]:
        return {**super().metrics(), "held_back_total": float(self._held_back)}
