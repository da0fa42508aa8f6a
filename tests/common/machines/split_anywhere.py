"""A placement that cuts requests anywhere, on any workers, for tests of what follows from it."""

from __future__ import annotations

from random import Random

from cohort.common.policies.baselines.placements import fits
from cohort.common.policies.interface import ClusterView, Impossible, Placed, Placement, Wait, WaitingRequest
from cohort.common.types import Segment


class SplitAnywhere(Placement):
    """Segments that meet at any position, in the prompt or in the output, on any two workers."""

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: str | None
    ) -> Placed | Wait | Impossible:
        request = waiting.request
        names = sorted(cluster.instances)
        views = [view for view in cluster.instances.values() if fits(view, request)]
        if not names or len(views) < len(names):
            return Impossible("too big") if names else Wait("nobody is there")
        first, second = self._random.choice(names), self._random.choice(names)
        split = self._random.randint(1, len(request.tokens) + request.sampling.max_tokens)
        if first == second:
            return Placed((Segment(0, None, first),), "one")
        return Placed((Segment(0, split, first), Segment(split, None, second)), "two")

    def finished(self, now_s: float, request_id: str) -> None:
        pass
