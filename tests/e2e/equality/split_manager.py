"""A bucketing manager for tests whose placement splits requests at given tokens, one place after the other.

    python -m tests.e2e.equality.split_manager --config … --instance … --run-dir …

Everything else is the real manager.
"""

from __future__ import annotations

from cohort.common.policies import compose
from cohort.common.policies.interface import ClusterView, Impossible, Placed, Placement, Wait, WaitingRequest
from cohort.common.process.service import service_main
from cohort.common.types import InstanceId, Segment
from cohort.services.bucketing_manager.service import serve

PLACES = ("whole", "half", "-1", "0", "1", "9", "400")
"""Offsets from the end of the prompt, but for the first two: into the prompt, at its end, into the output. Whole first:
the others must say the same. The last one lies beyond every answer's end."""


class SplitInTurn(Placement):
    def __init__(self) -> None:
        self._turn = 0

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: InstanceId | None
    ) -> Placed | Wait | Impossible:
        names = sorted(cluster.instances)
        if len(names) < 2:
            return Wait("two workers are needed")
        place = PLACES[self._turn % len(PLACES)]
        self._turn += 1
        prompt = len(waiting.request.tokens)
        if place == "whole":
            return Placed((Segment(0, None, names[self._turn % 2]),), "whole")
        split = max(1, prompt // 2 if place == "half" else prompt + int(place))
        first, second = names if self._turn % 2 else names[::-1]
        return Placed((Segment(0, split, first), Segment(split, None, second)), f"at {place}")


if __name__ == "__main__":
    compose.placement = lambda config: SplitInTurn()
    service_main("bucketing_manager", serve)
