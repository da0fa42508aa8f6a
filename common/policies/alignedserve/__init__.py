"""AlignedServe: decode batches of similar prefix length from a pool of KV in host memory (docs/papers.md, A1-A10)."""

from __future__ import annotations

from cohort.common.config import Config
from cohort.common.policies.alignedserve.aligned_batching import AlignedBatching
from cohort.common.policies.alignedserve.aligned_binding import AlignedBinding
from cohort.common.policies.alignedserve.late_bound import LateBound


def build_placement(config: Config) -> LateBound:
    return LateBound(config.alignedserve)


def build_late_binding(config: Config) -> AlignedBinding:
    return AlignedBinding(config.alignedserve, default_output=float(config.gateway.default_prediction_tokens))


def build_iteration(config: Config) -> AlignedBatching:
    engine = config.engine
    return AlignedBatching(
        max_rows=engine.max_rows,
        max_step_tokens=engine.max_step_tokens,
        prefill_chunk=engine.prefill_chunk,
        preemption=engine.preemption,
        sets_aside=config.policies.waiting_kv == "aligned",
    )
