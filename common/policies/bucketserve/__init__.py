"""BucketServe: adaptive length buckets, memory-safe batches, prefill and decode on workers of their own (B1–B11).

prefill_order      the manager's order: buckets in, batches out (B6, §III)
bucket_set         adaptive buckets: split and merge (Alg. 1; B5)
waste              padding of one batch and of all buckets, f(S) of Eq. 3 (Eq. 2, Eq. 3; B2)
safe_batch         KV of a batch (Eq. 1; B1), safe memory (Eq. 5; B3), the largest safe batch (Eq. 6; B4)
controller         Eq. 6 from live memory, request by request (B4, B7)
live_memory        what every worker really has left (B3, B7)
demand             what a forecast means for the next batch (B9)
length_index       waiting requests by length (B11); class, priority and age in one number (B6, B10)
padded_prefill     rectangular prefill batches on the worker (B2, B8)
"""

from __future__ import annotations

from cohort.common.config import Config
from cohort.common.policies.bucketserve.controller import BatchController
from cohort.common.policies.bucketserve.demand import DemandRule
from cohort.common.policies.bucketserve.padded_prefill import PaddedPrefill
from cohort.common.policies.bucketserve.prefill_order import LONGEST_PROMPT, BucketedPrefill
from cohort.common.policies.settings import BucketServeSettings, settings_of


def build_prefill_order(config: Config) -> BucketedPrefill:
    settings = settings_of(config, BucketServeSettings)
    controller = BatchController(
        settings,
        dispatch_ahead_tokens=config.manager.dispatch_ahead_tokens,
        demand=DemandRule(float(config.gateway.default_prediction_tokens)),
        padded=config.policies.iteration == "padded_prefill",
    )
    limit = config.model.max_model_len or LONGEST_PROMPT
    return BucketedPrefill(settings, controller, length_limit=limit)


def build_iteration(config: Config) -> PaddedPrefill:
    engine = config.engine
    return PaddedPrefill(
        max_rows=engine.max_rows,
        max_step_tokens=engine.max_step_tokens,
        prefill_chunk=engine.prefill_chunk,
        preemption=engine.preemption,
    )
