"""Configuration → policies. The only file that knows all systems; live services and the simulator both build here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from cohort.common.config import Config
from cohort.common.errors import ConfigError
from cohort.common.policies.alignedserve.aligned_batching import AlignedBatching
from cohort.common.policies.alignedserve.aligned_binding import AlignedBinding, BindingSettings
from cohort.common.policies.alignedserve.late_bound import LateBound
from cohort.common.policies.alignedserve.thresholds import Thresholds
from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.baselines.bounded_admission import BoundedAdmission
from cohort.common.policies.baselines.class_round_robin import ClassRoundRobin
from cohort.common.policies.baselines.continuous_batching import ContinuousBatching
from cohort.common.policies.baselines.feedback_queues import SkipJoinQueues
from cohort.common.policies.baselines.first_come import FirstCome
from cohort.common.policies.baselines.multi_resource import MultiResource
from cohort.common.policies.baselines.paged_allocation import PagedAllocator
from cohort.common.policies.baselines.placements import Colocated, ColocatedInTurn, Disaggregated
from cohort.common.policies.baselines.predicted_batches import PredictedBatches
from cohort.common.policies.baselines.prefill_first import PrefillFirst
from cohort.common.policies.baselines.ranked_batching import ArrivalRanking, RankedBatching
from cohort.common.policies.baselines.reserved_allocation import (
    Reservation,
    ReservedAllocator,
    all_positions,
    known_positions,
    predicted_positions,
)
from cohort.common.policies.baselines.shortest_remaining import ShortestRemaining
from cohort.common.policies.bros.batch_size import AdaptiveBatchSize
from cohort.common.policies.bros.bidirectional_allocation import BidirectionalAllocator
from cohort.common.policies.bros.iteration_cost import IterationCost
from cohort.common.policies.bros.slack_packing import PackingSettings, SlackPacking
from cohort.common.policies.bros.token_groups import TokenGroups
from cohort.common.policies.bucketserve.controller import BatchController
from cohort.common.policies.bucketserve.demand import DemandRule
from cohort.common.policies.bucketserve.padded_prefill import PaddedPrefill
from cohort.common.policies.bucketserve.prefill_order import BucketedPrefill, BucketSettings
from cohort.common.policies.dynaserve.pressure_gate import PressureGate
from cohort.common.policies.dynaserve.slo_batching import SloBatching
from cohort.common.policies.dynaserve.split_placement import SplitPlacement, SplitSettings
from cohort.common.policies.ecoserve.by_forecast import ByForecast
from cohort.common.policies.ecoserve.nested_allocation import NestedAllocator
from cohort.common.policies.ecoserve.padding_ratio import PaddingRatio
from cohort.common.policies.ecoserve.task_order import Ranges
from cohort.common.policies.ecoserve.time_synced import EcoServeSettings, TimeSynced
from cohort.common.policies.interface import Admission, IterationScheduler, LateBinding, Placement, PrefillOrder
from cohort.common.policies.kv_interface import KvAllocator
from cohort.common.types import KvGeometry

ADMISSIONS = ("bounded",)
PLACEMENTS = ("colocated", "colocated_in_turn", "disaggregated", "late_bound", "split")
PREFILL_ORDERS = ("fcfs", "buckets", "pressure_gate")
BASELINE_ITERATIONS = (
    "chunked_prefill",
    "vllm",
    "orca",
    "srtf",
    "mlfq",
    "multires",
    "round_robin",
    "predicted_batches",
)
ITERATIONS = (
    "continuous_batching",
    "padded_prefill",
    "slo_batching",
    "slack_packing",
    "time_synced",
    "aligned_batching",
    *BASELINE_ITERATIONS,
)
ALLOCATIONS = ("paged", "max", "predicted", "nested", "bidirectional")
WAITING_KV = ("none", "aligned")


def admission(config: Config) -> Admission:
    _known("admission", config.policies.admission, ADMISSIONS)
    return BoundedAdmission(
        max_waiting_requests=config.gateway.max_waiting_requests, max_waiting_tokens=config.gateway.max_waiting_tokens
    )


def placement(config: Config) -> Placement:
    name = config.policies.placement
    _known("placement", name, PLACEMENTS)
    if name == "colocated_in_turn":
        return ColocatedInTurn()
    if name == "split":
        return _split_placement(config)
    if name == "late_bound":
        return LateBound(_thresholds(config))
    return Colocated() if name == "colocated" else Disaggregated()


def prefill_order(config: Config) -> PrefillOrder:
    _known("prefill_order", config.policies.prefill_order, PREFILL_ORDERS)
    if config.policies.prefill_order == "buckets":
        return _bucketed_prefill(config)
    if config.policies.prefill_order == "pressure_gate":
        return PressureGate(
            dispatch_ahead_tokens=config.manager.dispatch_ahead_tokens,
            tbt_slo_s=config.dynaserve.tbt_slo_s,
            headroom=config.dynaserve.headroom,
        )
    return FirstCome(dispatch_ahead_tokens=config.manager.dispatch_ahead_tokens)


def _bucketed_prefill(config: Config) -> PrefillOrder:
    options = config.bucketserve
    demand = DemandRule(
        horizon_s=options.demand_horizon_s,
        max_age_s=options.forecast_max_age_s,
        default_output=float(config.gateway.default_prediction_tokens),
    )
    controller = BatchController(
        reserve=options.memory_reserve,
        max_batch=options.max_batch,
        dispatch_ahead_tokens=config.manager.dispatch_ahead_tokens,
        activation_bytes=options.activation_bytes,
        figures_max_age_s=options.figures_max_age_s,
        demand=demand,
        padded=options.padding == "longest",
        staging=options.staging_share,
    )
    settings = BucketSettings(
        fill=options.fill,
        splitter=options.splitter,
        split_share=options.split_share,
        max_buckets=options.max_buckets,
        output_estimate=options.output_estimate,
        priority_step_s=options.priority_step_s,
        offline_delay_s=options.offline_delay_s,
        length_limit=config.model.max_model_len or 131_072,
    )
    return BucketedPrefill(settings, controller)


def _split_placement(config: Config) -> SplitPlacement:
    options = config.dynaserve
    return SplitPlacement(
        SplitSettings(
            probes=options.search_probes,
            tolerance=options.search_tolerance,
            margin_tokens=options.margin_tokens,
            hand_over_s=options.hand_over_s,
            await_arrivals=options.await_arrivals,
            least_segment=options.least_segment,
            balance=options.balance,
            tbt_slo_s=options.tbt_slo_s,
            headroom=options.headroom,
            least_prefill=options.least_prefill,
            default_output=float(config.gateway.default_prediction_tokens),
        )
    )


def late_binding(config: Config) -> LateBinding | None:
    _known("waiting_kv", config.policies.waiting_kv, WAITING_KV)
    if config.policies.waiting_kv == "none":
        return None
    options = config.alignedserve
    return AlignedBinding(
        BindingSettings(
            thresholds=_thresholds(config),
            longest_prefix=options.longest_prefix,
            leaf_tokens=options.leaf_tokens,
            slack=options.slack,
            buffer_share=options.buffer_share,
            starvation_s=options.starvation_s,
            starvation_share=options.starvation_share,
            default_output=float(config.gateway.default_prediction_tokens),
            prefetch=options.prefetch,
            aligned=options.aligned,
            fill_memory=options.fill_memory,
        )
    )


def _thresholds(config: Config) -> Thresholds:
    return Thresholds(config.alignedserve.batch_share, config.alignedserve.least_requests)


def iteration(config: Config) -> IterationScheduler:
    _known("iteration", config.policies.iteration, ITERATIONS)
    if config.policies.iteration in BASELINE_ITERATIONS:
        return _baseline_iteration(config)
    if config.policies.iteration == "time_synced":
        return _time_synced(config)
    if config.policies.iteration == "aligned_batching":
        engine = config.engine
        return AlignedBatching(
            max_rows=engine.max_rows,
            max_step_tokens=engine.max_step_tokens,
            prefill_chunk=engine.prefill_chunk,
            preemption=engine.preemption,
            sets_aside=config.policies.waiting_kv == "aligned",
        )
    if config.policies.iteration == "slo_batching":
        return _slo_batching(config)
    if config.policies.iteration == "slack_packing":
        return _slack_packing(config)
    batching = PaddedPrefill if config.policies.iteration == "padded_prefill" else ContinuousBatching
    return batching(
        max_rows=config.engine.max_rows,
        max_step_tokens=config.engine.max_step_tokens,
        prefill_chunk=config.engine.prefill_chunk,
        preemption=config.engine.preemption,
    )


def _slo_batching(config: Config) -> SloBatching:
    engine, options = config.engine, config.dynaserve
    limits = IterationLimits(engine.max_rows, engine.max_step_tokens, engine.max_step_tokens, engine.preemption)
    return SloBatching(
        limits,
        tbt_slo_s=options.tbt_slo_s,
        headroom=options.headroom,
        least_prefill=options.least_prefill,
        cold_chunk=engine.prefill_chunk,
    )


def _slack_packing(config: Config) -> SlackPacking:
    engine, options = config.engine, config.bros
    settings = PackingSettings(
        max_rows=engine.max_rows,
        max_tokens=engine.max_step_tokens,
        chunk=engine.prefill_chunk,
        preemption=engine.preemption,
        cut_prompts=options.cut_prompts,
        rt_starvation_s=options.rt_starvation_s,
        be_starvation_s=options.be_starvation_s,
        starving_every=options.starving_every,
        best_effort_share=options.best_effort_share,
    )
    size = AdaptiveBatchSize(first=options.first_batch, step=options.batch_step, most=engine.max_rows)
    groups = TokenGroups(
        group_tokens=options.group_tokens,
        default_ttft_s=config.gateway.rt_ttft_slo_s,
        default_tpot_s=config.gateway.rt_tpot_slo_s,
    )
    return SlackPacking(settings, size, groups, IterationCost())


def _time_synced(config: Config) -> TimeSynced:
    engine, options = config.engine, config.ecoserve
    settings = EcoServeSettings(
        max_rows=engine.max_rows,
        target_tokens=min(options.target_forward_tokens or engine.max_step_tokens, engine.max_step_tokens),
        preemption=engine.preemption,
        reserve=options.reserve,
        waiting_share=options.waiting_share,
        group_tokens=options.group_tokens,
        buffer=options.buffer,
        slo_scale=options.slo_scale,
        patience_s=options.patience_s,
        synced=options.synced,
        ordered=options.ordered,
        pipelined=options.pipelined,
        decoupled=options.decoupled,
        ranges=Ranges(options.deadline_ranges_s, options.overdue_range_s, options.occupied_range_tokens),
    )
    padding = PaddingRatio(options.padding, tuned=options.tune_padding, under_cost=options.under_cost)
    by_forecast = options.pipelined and options.lending == "forecast"
    return ByForecast(settings, padding) if by_forecast else TimeSynced(settings, padding)


def _baseline_iteration(config: Config) -> IterationScheduler:
    engine, options = config.engine, config.baselines
    reservation = _reservation(config)
    target = min(options.target_forward_tokens or engine.max_step_tokens, engine.max_step_tokens)
    # Baselines other than these two compute prompts as a whole where an iteration can hold them.
    whole = IterationLimits(engine.max_rows, engine.max_step_tokens, engine.max_step_tokens, engine.preemption)
    fixed = replace(whole, max_rows=min(options.batch_size, engine.max_rows))
    match config.policies.iteration:
        case "chunked_prefill":
            return ContinuousBatching(
                max_rows=engine.max_rows, max_step_tokens=target, prefill_chunk=target, preemption=engine.preemption
            )
        case "vllm":
            return PrefillFirst(whole)
        case "orca":
            return RankedBatching(ArrivalRanking(), fixed, reservation=reservation, evicting=False)
        case "srtf":
            return RankedBatching(ShortestRemaining(), fixed, reservation=reservation, evicting=True)
        case "mlfq":
            queues = SkipJoinQueues(
                levels=options.queue_levels, quantum_s=options.queue_quantum_s, starvation_s=options.queue_starvation_s
            )
            return RankedBatching(queues, fixed, reservation=reservation, evicting=True)
        case "multires":
            return MultiResource(replace(whole, max_tokens=target, chunk=target), reservation=reservation)
        case "round_robin":
            return ClassRoundRobin(replace(whole, chunk=engine.prefill_chunk))
        case "predicted_batches":
            return PredictedBatches(
                replace(whole, padded=options.padded),
                reservation=reservation,
                spread=options.batch_spread,
                rectangular_kv=options.rectangular_kv,
            )
        case name:
            raise AssertionError(f"{name} is no baseline")


def _reservation(config: Config) -> Reservation:
    """What the chosen allocation takes at admission: schedulers that plan with memory must count as it does."""
    match config.policies.allocation:
        case "max":
            return all_positions
        case "predicted":
            return predicted_positions(config.baselines.prediction_padding)
        case _:
            return known_positions


def allocation(config: Config, geometry: KvGeometry, num_blocks: int, host_blocks: int) -> KvAllocator:
    _known("allocation", config.policies.allocation, ALLOCATIONS)
    if config.policies.allocation == "paged":
        return PagedAllocator(geometry, num_blocks, host_blocks, prefix_caching=config.kv.prefix_caching)
    if config.policies.allocation == "bidirectional":
        return BidirectionalAllocator(geometry, num_blocks, host_blocks)
    if config.policies.allocation == "nested":
        return NestedAllocator(geometry, num_blocks, host_blocks, prefix_caching=config.kv.prefix_caching)
    return ReservedAllocator(
        geometry, num_blocks, host_blocks, reservation=_reservation(config), prefix_caching=config.kv.prefix_caching
    )


def check_names(config: Config) -> None:
    """Raises `ConfigError` for a policy nobody knows; every process calls it at start."""
    policies = config.policies
    seats: Mapping[str, tuple[str, tuple[str, ...]]] = {
        "admission": (policies.admission, ADMISSIONS),
        "placement": (policies.placement, PLACEMENTS),
        "prefill_order": (policies.prefill_order, PREFILL_ORDERS),
        "iteration": (policies.iteration, ITERATIONS),
        "allocation": (policies.allocation, ALLOCATIONS),
        "waiting_kv": (policies.waiting_kv, WAITING_KV),
    }
    for seat, (name, known) in seats.items():
        _known(seat, name, known)
    if (policies.iteration == "padded_prefill") != (config.bucketserve.padding == "longest"):
        raise ConfigError("bucketserve.padding longest and policies.iteration padded_prefill go together")
    if policies.placement == "late_bound" and policies.waiting_kv == "none":
        raise ConfigError("policies.placement late_bound needs somebody who binds: set policies.waiting_kv aligned")
    if policies.allocation == "bidirectional":
        if config.kv.prefix_caching:
            raise ConfigError("policies.allocation bidirectional shares blocks by slots: set kv.prefix_caching false")
        if config.bucketserve.padding == "longest" or config.baselines.padded:
            raise ConfigError("policies.allocation bidirectional: padding would overwrite the other request's slots")


def _known(seat: str, name: str, known: tuple[str, ...]) -> None:
    if name not in known:
        raise ConfigError(f"policies.{seat}: no policy named {name!r}; there are: {', '.join(known)}")
