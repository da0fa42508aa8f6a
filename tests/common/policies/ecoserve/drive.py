"""EcoServe's scheduler over caches of either kind, for tests without a cluster."""

from __future__ import annotations

from typing import Any, Literal

from cohort.common.config import EcoServeAblation, EcoServeConfig
from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.ecoserve.nested_allocation import NestedAllocator
from cohort.common.policies.ecoserve.time_synced import TimeSynced
from tests.common.policies.baselines.drive import GEOMETRY


def scheduler(
    *, target_tokens: int = 32, preemption: Literal["swap", "recompute"] = "swap", **given: Any
) -> TimeSynced:
    limits = IterationLimits(16, target_tokens, target_tokens, preemption)
    return TimeSynced(options(**{"waiting_share": 1.0, **given}), limits)


def options(**given: Any) -> EcoServeConfig:
    """Of the preset, but exact: no padding, no reserve, no rounding. Switches of `ablation` go by their own name."""
    parts = {name: given.pop(name) for name in EcoServeAblation.__struct_fields__ if name in given}
    ablation = EcoServeAblation(**{"tune_padding": False, **parts})
    return EcoServeConfig(**{"padding": 0.0, "group_tokens": 1, "reserve": 0.0, **given}, ablation=ablation)


def nested(blocks: int, host: int = 0, *, caching: bool = False) -> NestedAllocator:
    return NestedAllocator(GEOMETRY, blocks, host, prefix_caching=caching)
