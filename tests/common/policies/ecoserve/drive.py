"""EcoServe's scheduler over caches of either kind, for tests without a cluster."""

from __future__ import annotations

from typing import Any

from cohort.common.policies.ecoserve.nested_allocation import NestedAllocator
from cohort.common.policies.ecoserve.padding_ratio import PaddingRatio
from cohort.common.policies.ecoserve.time_synced import EcoServeSettings, TimeSynced
from tests.common.policies.baselines.drive import GEOMETRY


def scheduler(*, padding: float = 0.0, **settings: Any) -> TimeSynced:
    given = {"max_rows": 16, "target_tokens": 32, "group_tokens": 1, "reserve": 0.0, "waiting_share": 1.0, **settings}
    return TimeSynced(EcoServeSettings(**given), PaddingRatio(padding, tuned=False))


def nested(blocks: int, host: int = 0, *, caching: bool = False) -> NestedAllocator:
    return NestedAllocator(GEOMETRY, blocks, host, prefix_caching=caching)
