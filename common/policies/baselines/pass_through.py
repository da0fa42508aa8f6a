"""Nothing waits at the manager: every request is dispatched at once, in the order of first come, first served.

For systems whose worker orders prompts itself and must see all that wait. A dispatched request stays on its worker.
"""

from __future__ import annotations

from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.interface import ClusterView, Dispatch


class PassThrough(Fcfs):
    """Requests stay here only while there is no worker, or after placement found none for them (`Wait`)."""

    def __init__(self) -> None:
        super().__init__(dispatch_ahead_tokens=0)

    def decide(self, now_s: float, cluster: ClusterView) -> list[Dispatch]:
        if not cluster.instances:
            return []
        dispatches = []
        for _, waiting in sorted(self._waiting.values(), key=lambda entry: entry[0]):
            self.remove(now_s, waiting.request_id)
            dispatches.append(Dispatch((waiting.request_id,), self._next_batch, None, "passed through"))
            self._next_batch += 1
        return dispatches
