"""Whether best-effort requests have had their share of the time lately (`best_effort_share`).

A share of every iteration would be theirs in a burst of real-time requests too, right after a pause that gave them all
of it. So what they had beyond the share counts for a while: they keep it over as long as one of them may go unserved,
not at every moment. Owned by `slack_packing.py`, told of every iteration while best-effort requests are here.
"""

from __future__ import annotations

from cohort.common.policies.bros.iteration_cost import BatchLoad, IterationCost, load_of
from cohort.common.policies.interface import Ran


class BestEffortTime:
    def __init__(self, share: float, window_s: float) -> None:
        """`window_s`: time for which what they had beyond their share stands in for it, at most."""
        self._share, self._most_s = share, share * window_s
        self._ahead_s = 0.0

    def ran(self, ran: Ran, cost: IterationCost) -> None:
        """An iteration is theirs as far as it took longer for their rows. What they did not get is not owed: beside
        lasting overload of real-time requests they have their share of each iteration, as from the start."""
        rows, total_s = ran.plan.rows, sum(ran.times_s)
        if not rows:
            return
        real_time = load_of([row for row in rows if row.sequence.request.traffic_class == "rt"])
        whole_s = cost.exec_s(load_of(rows))
        own = 0.0 if real_time == BatchLoad() else cost.exec_s(real_time) / whole_s if whole_s else 1.0
        ahead_s = self._ahead_s + (1.0 - own - self._share) * total_s
        self._ahead_s = min(max(0.0, ahead_s), self._most_s)

    @property
    def kept_back(self) -> float:
        """Share of the next iteration that real-time prompts leave to them."""
        return 0.0 if self._ahead_s > 0.0 else self._share
