"""The manager's queue as a person sees it: by class, and by length where its order has buckets.

Pure: reads a `ManagerMachine`, changes nothing, is asked only while a person looks (`Look`). Called by the live host.
"""

from __future__ import annotations

from collections.abc import Iterable

from cohort.common.policies.interface import WaitingRequest
from cohort.common.types import TrafficClass
from cohort.common.views import QueueClass


def classes_of(waiting: Iterable[WaitingRequest], now_s: float) -> list[QueueClass]:
    """Real-time before best-effort, online before batch work."""
    found: dict[tuple[bool, bool], list[float]] = {}
    for item in waiting:
        request = item.request
        sums = found.setdefault((request.traffic_class == "be", not request.online), [0.0, 0.0, now_s])
        sums[0] += 1
        sums[1] += len(request.tokens)
        sums[2] = min(sums[2], item.since_s)
    classes: tuple[TrafficClass, TrafficClass] = ("rt", "be")
    return [
        QueueClass(classes[best_effort], not offline, int(count), int(tokens), round(max(0.0, now_s - since_s), 3))
        for (best_effort, offline), (count, tokens, since_s) in sorted(found.items())
    ]
