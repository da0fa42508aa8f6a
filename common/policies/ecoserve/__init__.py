"""EcoServe: prompts fill the device, answers fill the KV cache, groups run in step, KV blocks are lent (E1–E10)."""

from __future__ import annotations

from cohort.common.config import Config
from cohort.common.policies.baselines.draft import IterationLimits
from cohort.common.policies.ecoserve.by_forecast import ByForecast
from cohort.common.policies.ecoserve.nested_allocation import NestedAllocator
from cohort.common.policies.ecoserve.time_synced import TimeSynced
from cohort.common.types import KvGeometry


def build_iteration(config: Config) -> TimeSynced:
    engine, options = config.engine, config.ecoserve
    target = min(engine.target_forward_tokens or engine.max_step_tokens, engine.max_step_tokens)
    limits = IterationLimits(engine.max_rows, target, target, engine.preemption)
    by_forecast = options.ablation.pipelined and options.lending == "forecast"
    return ByForecast(options, limits) if by_forecast else TimeSynced(options, limits)


def build_allocation(config: Config, geometry: KvGeometry, num_blocks: int, host_blocks: int) -> NestedAllocator:
    return NestedAllocator(geometry, num_blocks, host_blocks, prefix_caching=config.kv.prefix_caching)
