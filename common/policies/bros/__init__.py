"""BROS: real-time and best-effort requests on the same device, their KV in the same blocks (mechanisms R1-R15)."""

from __future__ import annotations

from cohort.common.config import Config
from cohort.common.policies.baselines.draft import IterationLimits
from cohort.common.policies.bros.bidirectional_allocation import BidirectionalAllocator
from cohort.common.policies.bros.iteration_cost import IterationCost
from cohort.common.policies.bros.slack_packing import SlackPacking
from cohort.common.policies.bros.token_groups import TokenGroups
from cohort.common.types import KvGeometry


def build_iteration(config: Config) -> SlackPacking:
    engine = config.engine
    limits = IterationLimits(engine.max_rows, engine.max_step_tokens, engine.prefill_chunk, engine.preemption)
    groups = TokenGroups(
        group_tokens=config.bros.group_tokens,
        default_ttft_s=config.gateway.rt_ttft_slo_s,
        default_tpot_s=config.gateway.rt_tpot_slo_s,
    )
    return SlackPacking(config.bros, limits, groups, IterationCost())


def build_allocation(config: Config, geometry: KvGeometry, num_blocks: int, host_blocks: int) -> BidirectionalAllocator:
    return BidirectionalAllocator(geometry, num_blocks, host_blocks)
