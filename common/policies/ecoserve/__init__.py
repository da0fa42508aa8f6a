"""EcoServe: prompts fill the device, decodes fill the KV cache, groups run in step, KV blocks are lent (E1–E10).

time_synced         the worker's scheduler (Alg. 1; E1, E2, E3, E5, E8, E10)
batch               groups in step, their ends, the clock (E3)
task_order          the order of waiting prompts and decodes (E6)
deadlines           when a request should be complete (E9)
padding_ratio       how much longer than predicted a decode is allocated (E4)
loans               which decode fits into another's second half, and when it must give back (E7, E8)
nested_allocation   blocks with a stack of claims (E7)
by_forecast         lending all blocks to all decodes, by the predicted peak (E2, E7)
forward_size        the target forward size from what iterations take (E1)
"""

from __future__ import annotations

from cohort.common.config import Config
from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.ecoserve.by_forecast import ByForecast
from cohort.common.policies.ecoserve.nested_allocation import NestedAllocator
from cohort.common.policies.ecoserve.time_synced import TimeSynced
from cohort.common.policies.settings import EcoServeSettings, settings_of
from cohort.common.types import KvGeometry


def build_iteration(config: Config) -> TimeSynced:
    engine, options = config.engine, settings_of(config, EcoServeSettings)
    target = min(engine.target_forward_tokens or engine.max_step_tokens, engine.max_step_tokens)
    limits = IterationLimits(engine.max_rows, target, target, engine.preemption)
    kind = ByForecast if options.pipelined and options.lending == "forecast" else TimeSynced
    return kind(options, limits, learn_size=not engine.target_forward_tokens)


def build_allocation(config: Config, geometry: KvGeometry, num_blocks: int, host_blocks: int) -> NestedAllocator:
    return NestedAllocator(geometry, num_blocks, host_blocks, prefix_caching=config.kv.prefix_caching)
