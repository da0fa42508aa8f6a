"""Which requests give way to one that finds no blocks."""

from __future__ import annotations

from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.bros.batch import Batch
from cohort.common.types import Attempt
from tests.common.policies.bros.test_slack_packing import GEOMETRY, packing, running


def test_a_best_effort_request_takes_blocks_of_later_ones_alone() -> None:
    """R11 · Or two of them would push each other out in turns."""
    policy, kv = packing(), PagedAllocator(GEOMETRY, 30, 0, prefix_caching=False)
    own = running(policy, kv, "own", 12, "be", last_s=0.0)
    own.arrived_s = 0.5
    for name, arrived_s in (("oldest", 0.1), ("later", 0.6), ("older", 0.4), ("latest", 0.9)):
        running(policy, kv, name, 8, "be", last_s=0.0).arrived_s = arrived_s
    running(policy, kv, "real-time", 8, "rt", last_s=0.0)
    while kv.free_blocks:
        assert kv.reserve(Attempt(f"filler{kv.free_blocks}", 1), [1], 1) is not None
    found = policy._droppable(kv, Batch(8, 512), own, real_time=True)
    assert [one.request_id for one in found] == ["latest", "later"]
