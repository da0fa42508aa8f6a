"""Cohort: one scheduler out of what the five systems do best.

promise          when a request's next token is due
prompt_order     which prompt is computed next
row_sharing      which sequences have a row where more decode than an iteration has rows
running_table    what all that hold KV were promised, as arrays
cohort_batching  the worker's scheduler: decodes, then prompts as far as the strictest promise leaves time
ttft_forecast    when a worker would yield the first token of one more request
placed_work      what is on a worker: the last report, and what was placed there since
prefix_record    which prompts were computed where
arriving_prompts how much prompt work keeps arriving, by length
least_ttft       the manager's placement: where the first token comes soonest
admission_check  whether a request that is predicted to be late is served, demoted or refused
"""

from __future__ import annotations

import msgspec

from cohort.common.config import Config
from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.cohort.admission_check import AdmissionTest
from cohort.common.policies.cohort.cohort_batching import CohortBatching
from cohort.common.policies.cohort.least_ttft import LeastTtft
from cohort.common.policies.settings import CohortSettings, settings_of

_NEVER_S = 1e9


def build_iteration(config: Config) -> CohortBatching:
    engine = config.engine
    limits = IterationLimits(engine.max_rows, engine.max_step_tokens, engine.max_step_tokens, engine.preemption)
    return CohortBatching(settings_of(config, CohortSettings), limits, cold_chunk=engine.prefill_chunk)


def build_placement(config: Config) -> LeastTtft:
    """Build the placement. Its forecast follows the order of the workers' scheduler: `cohort_batching`'s own; that of
    `slack_packing` (by due time, late ones last); else that of arrival."""
    options, iteration = settings_of(config, CohortSettings), config.policies.iteration
    if iteration == "slack_packing":
        options = msgspec.structs.replace(options, prompt_order="earliest_due", patience_s=_NEVER_S)
    return LeastTtft(
        options,
        AdmissionTest(options.refuse_late),
        default_output=float(config.gateway.default_prediction_tokens),
        own_order=iteration in ("cohort_batching", "slack_packing"),
        caching=config.kv.prefix_caching,
    )
