"""The field's common ground: first come first served, continuous batching, paged allocation, P/D and colocation."""

from __future__ import annotations

from dataclasses import replace

from cohort.common.config import Config
from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.baselines.bounded_admission import BoundedAdmission
from cohort.common.policies.baselines.class_round_robin import ClassRoundRobin
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.fcfs import Fcfs
from cohort.common.policies.baselines.feedback_queues import SkipJoinQueues
from cohort.common.policies.baselines.multi_resource import MultiResource
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.baselines.predicted_batches import PredictedBatches
from cohort.common.policies.baselines.prefill_first import PrefillFirst
from cohort.common.policies.baselines.ranked_batching import ArrivalRanking, RankedBatching, Ranking
from cohort.common.policies.baselines.reserved_allocation import (
    Reservation,
    ReservedAllocator,
    all_positions,
    known_positions,
    predicted_positions,
)
from cohort.common.policies.baselines.shortest_remaining import ShortestRemaining
from cohort.common.policies.settings import BaselinesSettings, settings_of
from cohort.common.types import KvGeometry


def build_admission(config: Config) -> BoundedAdmission:
    """Build the admission of one gateway."""
    gateway = config.gateway
    return BoundedAdmission(
        max_waiting_requests=gateway.own_waiting_requests,
        max_waiting_tokens=gateway.own_waiting_tokens,
        owner_share=config.keys.owner_share,
        of_all=gateway.of_all,
    )


def build_fcfs(config: Config) -> Fcfs:
    return Fcfs(dispatch_ahead_tokens=config.manager.dispatch_ahead_tokens)


def build_continuous_batching(config: Config) -> ContinuousBatching:
    engine = config.engine
    return ContinuousBatching(
        max_rows=engine.max_rows,
        max_step_tokens=engine.max_step_tokens,
        prefill_chunk=engine.prefill_chunk,
        preemption=engine.preemption,
    )


def build_chunked_prefill(config: Config) -> ContinuousBatching:
    engine, target = config.engine, _target_tokens(config)
    return ContinuousBatching(
        max_rows=engine.max_rows,
        max_step_tokens=target,
        prefill_chunk=target,
        preemption=engine.preemption,
        headroom=settings_of(config, BaselinesSettings).headroom,
    )


def build_vllm(config: Config) -> PrefillFirst:
    return PrefillFirst(_whole_prompts(config), headroom=settings_of(config, BaselinesSettings).headroom)


def build_orca(config: Config) -> RankedBatching:
    return _fixed_batch(config, ArrivalRanking(), evicting=False)


def build_srtf(config: Config) -> RankedBatching:
    return _fixed_batch(config, ShortestRemaining(), evicting=True)


def build_mlfq(config: Config) -> RankedBatching:
    return _fixed_batch(
        config, SkipJoinQueues(starvation_s=settings_of(config, BaselinesSettings).queue_starvation_s), evicting=True
    )


def build_multires(config: Config) -> MultiResource:
    target = _target_tokens(config)
    limits = replace(_whole_prompts(config), max_tokens=target, chunk=target)
    return MultiResource(limits, reservation=_reservation(config))


def build_round_robin(config: Config) -> ClassRoundRobin:
    return ClassRoundRobin(_whole_prompts(config))


def build_predicted_batches(config: Config) -> PredictedBatches:
    settings = settings_of(config, BaselinesSettings)
    return PredictedBatches(
        replace(_whole_prompts(config), padded=settings.padded),
        reservation=_reservation(config),
        rectangular_kv=settings.rectangular_kv,
        static=settings.static_batches,
    )


def _fixed_batch(config: Config, ranking: Ranking, *, evicting: bool) -> RankedBatching:
    whole = _whole_prompts(config)
    limits = replace(whole, max_rows=min(config.baselines.batch_size, whole.max_rows))
    return RankedBatching(ranking, limits, reservation=_reservation(config), evicting=evicting)


def _whole_prompts(config: Config) -> IterationLimits:
    """Return limits under which prompts are computed whole where an iteration can hold them."""
    engine = config.engine
    return IterationLimits(engine.max_rows, engine.max_step_tokens, engine.max_step_tokens, engine.preemption)


def _target_tokens(config: Config) -> int:
    engine = config.engine
    return min(engine.target_forward_tokens or engine.max_step_tokens, engine.max_step_tokens)


def build_paged(config: Config, geometry: KvGeometry, num_blocks: int, host_blocks: int) -> PagedAllocator:
    return PagedAllocator(geometry, num_blocks, host_blocks, prefix_caching=config.kv.prefix_caching)


def build_reserved(config: Config, geometry: KvGeometry, num_blocks: int, host_blocks: int) -> ReservedAllocator:
    reservation, caching = _reservation(config), config.kv.prefix_caching
    return ReservedAllocator(geometry, num_blocks, host_blocks, reservation=reservation, prefix_caching=caching)


def _reservation(config: Config) -> Reservation:
    """Return the blocks that the chosen allocation takes at admission; schedulers that plan with memory count alike."""
    match config.policies.allocation:
        case "max":
            return all_positions
        case "predicted":
            return predicted_positions(settings_of(config, BaselinesSettings).prediction_padding)
        case _:
            return known_positions
