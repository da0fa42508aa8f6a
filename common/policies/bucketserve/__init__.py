"""BucketServe: adaptive length buckets, memory-safe batches, prefill and decode on workers of their own (B1–B11)."""

from __future__ import annotations

from cohort.common.config import Config
from cohort.common.policies.bucketserve.controller import BatchController
from cohort.common.policies.bucketserve.demand import DemandRule
from cohort.common.policies.bucketserve.padded_prefill import PaddedPrefill
from cohort.common.policies.bucketserve.prefill_order import LONGEST_PROMPT, BucketedPrefill


def build_prefill_order(config: Config) -> BucketedPrefill:
    controller = BatchController(
        config.bucketserve,
        dispatch_ahead_tokens=config.manager.dispatch_ahead_tokens,
        demand=DemandRule(float(config.gateway.default_prediction_tokens)),
        padded=config.policies.iteration == "padded_prefill",
    )
    limit = config.model.max_model_len or LONGEST_PROMPT
    return BucketedPrefill(config.bucketserve, controller, length_limit=limit)


def build_iteration(config: Config) -> PaddedPrefill:
    engine = config.engine
    return PaddedPrefill(
        max_rows=engine.max_rows,
        max_step_tokens=engine.max_step_tokens,
        prefill_chunk=engine.prefill_chunk,
        preemption=engine.preemption,
    )
