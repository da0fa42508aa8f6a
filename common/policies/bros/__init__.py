"""BROS: real-time and best-effort requests on the same device, their KV in the same blocks (mechanisms R1-R15).

slack_packing              the worker's scheduler: what runs next (Alg. 1; R2, R4)
batch                      the iteration in the making, and its size (R6)
drops                      which request is dropped when no block can be had (R11)
request_queues             two classes, waiting and pending, pulled by urgency (R1, R5, Fig. 8)
token_groups               deadlines of token groups and what they leave (R2, R15)
iteration_cost             what the next iteration takes, learned (R3)
bidirectional_allocation   blocks filled from both ends (common/kv/shared_blocks); slots away and back (R7-R12)

R13 and R14 are the engine's: docs/papers.md.
"""

from __future__ import annotations

from dataclasses import replace

from cohort.common.config import Config
from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.bros.bidirectional_allocation import BidirectionalAllocator
from cohort.common.policies.bros.iteration_cost import IterationCost
from cohort.common.policies.bros.slack_packing import SlackPacking
from cohort.common.policies.bros.token_groups import TokenGroups
from cohort.common.policies.settings import BrosSettings, settings_of
from cohort.common.types import KvGeometry


def build_iteration(config: Config) -> SlackPacking:
    engine = config.engine
    limits = IterationLimits(engine.max_rows, engine.max_step_tokens, engine.prefill_chunk, engine.preemption)
    settings = settings_of(config, BrosSettings)
    groups = TokenGroups(
        group_tokens=settings.group_tokens,
        default_ttft_s=config.gateway.rt_ttft_slo_s,
        default_tpot_s=config.gateway.rt_tpot_slo_s,
    )
    return SlackPacking(settings, limits, groups, IterationCost())


def build_allocation(config: Config, geometry: KvGeometry, num_blocks: int, host_blocks: int) -> BidirectionalAllocator:
    """Build the allocator. It keeps blocks behind a window, because sequences share blocks from both ends."""
    return BidirectionalAllocator(replace(geometry, window=0), num_blocks, host_blocks)
