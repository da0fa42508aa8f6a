"""A placement that refuses and demotes at random, also what was accepted before: the manager must not let it."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from cohort.common.policies.interface import ClusterView, Impossible, Placed, Placement, Refuse, Wait, WaitingRequest
from cohort.common.types import InstanceId, RequestId


class Refusing(Placement):
    def __init__(self, inner: Placement, seed: int) -> None:
        self._inner = inner
        self._random = Random(seed)

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: InstanceId | None
    ) -> Placed | Wait | Impossible | Refuse:
        sampled = self._random.random()
        if sampled < 0.3:
            return Refuse("infeasible", self._random.random() * 5.0, 1.0)
        placed = self._inner.place(now_s, waiting, cluster, preferred)
        return replace(placed, best_effort=True) if isinstance(placed, Placed) and sampled < 0.5 else placed

    def finished(self, now_s: float, request_id: RequestId) -> None:
        self._inner.finished(now_s, request_id)
