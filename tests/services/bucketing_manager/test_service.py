"""What people see of the manager's queue."""

from __future__ import annotations

import msgspec

from cohort.common.policies.interface import WaitingRequest
from cohort.common.types import Request, TrafficClass
from cohort.services.bucketing_manager.service import classes_of
from tests.common.machines.small_worker import whole


def asked(name: str, traffic_class: TrafficClass, tokens: int) -> Request:
    request = whole(name).request
    return msgspec.structs.replace(request, traffic_class=traffic_class, tokens=[7] * tokens, prompt_tokens=tokens)


def test_the_queue_is_summed_by_class() -> None:
    items = [
        WaitingRequest(asked(name, traffic_class, tokens), since_s, None)
        for name, traffic_class, tokens, since_s in (("a", "rt", 5, 3.0), ("b", "be", 7, 1.0), ("c", "rt", 6, 2.0))
    ]
    found = [(each.traffic_class, each.requests, each.tokens, each.oldest_s) for each in classes_of(items, 4.0)]
    assert found == [("rt", 2, 11, 2.0), ("be", 1, 7, 3.0)]
    assert classes_of([], 4.0) == []
