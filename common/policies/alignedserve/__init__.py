"""AlignedServe: decode batches of similar prefix length from a pool of KV in host memory (docs/papers.md, A1-A10).

late_bound             placement: the prompt now, the response wherever its KV is bound later (A2)
aligned_binding        the manager's late binding: which request joins which worker (Alg. 2, cases 1 and 2; A2-A9)
density_first_search   the next batch from the quad-tree (Alg. 1; A4)
quad_tree              prefix lengths of everything in the pool (A3)
thresholds             least and most of a batch (A4), when a waiting request goes first (A8)
batch_numbers          numbers of aligned batches
aligned_batching       the worker's scheduler: which sequence is evicted (Alg. 2, case 3; A6)

The pool itself is the worker machine's (A2, A9).
"""

from __future__ import annotations

from cohort.common.config import Config
from cohort.common.policies.alignedserve.aligned_batching import AlignedBatching
from cohort.common.policies.alignedserve.aligned_binding import AlignedBinding
from cohort.common.policies.alignedserve.late_bound import LateBound
from cohort.common.policies.settings import AlignedServeSettings, settings_of


def build_placement(config: Config) -> LateBound:
    return LateBound(settings_of(config, AlignedServeSettings))


def build_late_binding(config: Config) -> AlignedBinding:
    settings = settings_of(config, AlignedServeSettings)
    return AlignedBinding(settings, default_output=float(config.gateway.default_prediction_tokens))


def build_iteration(config: Config) -> AlignedBatching:
    engine = config.engine
    return AlignedBatching(
        max_rows=engine.max_rows,
        max_step_tokens=engine.max_step_tokens,
        prefill_chunk=engine.prefill_chunk,
        preemption=engine.preemption,
        sets_aside=config.policies.waiting_kv == "aligned",
    )
