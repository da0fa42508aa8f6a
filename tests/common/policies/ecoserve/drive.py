"""EcoServe's scheduler over caches of either kind, for tests without a cluster."""

from __future__ import annotations

from typing import Any, Literal

from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.ecoserve.nested_allocation import NestedAllocator
from cohort.common.policies.ecoserve.time_synced import TimeSynced
from cohort.common.policies.settings import EcoServeSettings
from tests.common.policies.baselines.drive import GEOMETRY


def scheduler(
    *, target_tokens: int = 32, preemption: Literal["swap", "recompute"] = "swap", **given: Any
) -> TimeSynced:
    limits = IterationLimits(16, target_tokens, target_tokens, preemption)
    return TimeSynced(options(**{"waiting_share": 1.0, **given}), limits)


def options(**given: Any) -> EcoServeSettings:
    """Of the preset, but exact: no padding, no reserve, no rounding."""
    return EcoServeSettings(**{"padding": 0.0, "group_tokens": 1, "reserve": 0.0, "tune_padding": False, **given})


def nested(blocks: int, host: int = 0, *, caching: bool = False) -> NestedAllocator:
    return NestedAllocator(GEOMETRY, blocks, host, prefix_caching=caching)
