"""A bucketing manager for tests whose placement splits requests at given tokens, one place after the other.

    python -m tests.e2e.equality.split_manager --config … --instance … --run-dir …

`COHORT_TEST_SPLITS` lists the places, separated by commas: `whole`, or an offset from the end of the prompt in tokens
(`-5` in the prompt, `0` at its end, `7` in the output), or `half` (the middle of the prompt). Everything else is the
real manager.
"""

from __future__ import annotations

import os

from cohort.common.config import Config
from cohort.common.policies import compose
from cohort.common.policies.interface import ClusterView, Impossible, Placed, Placement, Wait, WaitingRequest
from cohort.common.process.service import service_main
from cohort.common.types import InstanceId, Segment
from cohort.services.bucketing_manager.service import serve


class SplitInTurn(Placement):
    def __init__(self, places: list[str]) -> None:
        self._places, self._turn = places, 0

    def place(
        self, now_s: float, waiting: WaitingRequest, cluster: ClusterView, preferred: InstanceId | None
    ) -> Placed | Wait | Impossible:
        names = sorted(cluster.instances)
        if len(names) < 2:
            return Wait("two workers are needed")
        place = self._places[self._turn % len(self._places)]
        self._turn += 1
        prompt = len(waiting.request.tokens)
        if place == "whole":
            return Placed((Segment(0, None, names[self._turn % 2]),), "whole")
        split = max(1, prompt // 2 if place == "half" else prompt + int(place))
        first, second = names if self._turn % 2 else names[::-1]
        return Placed((Segment(0, split, first), Segment(split, None, second)), f"at {place}")


def _placement(config: Config) -> Placement:
    return SplitInTurn(os.environ["COHORT_TEST_SPLITS"].split(","))


if __name__ == "__main__":
    compose.placement = _placement
    service_main("bucketing_manager", serve)
