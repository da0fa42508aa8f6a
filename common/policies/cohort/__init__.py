"""Cohort: one scheduler out of what the five systems do best.

promise          when a request's next token is due
prompt_order     which prompt is computed next
cohort_batching  the worker's scheduler: decodes, then prompts in this order, as much as the strictest promise leaves
admission_test   whether a request that is predicted to be late is served, demoted or refused
early_rejection  a placement around another one that applies this test
overtaking       what later, shorter prompts take of the workers' time
"""

from __future__ import annotations

from cohort.common.config import Config
from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.baselines.placements import Colocated
from cohort.common.policies.cohort.admission_test import AdmissionTest
from cohort.common.policies.cohort.cohort_batching import CohortBatching
from cohort.common.policies.cohort.early_rejection import EarlyRejection


def build_iteration(config: Config) -> CohortBatching:
    engine = config.engine
    limits = IterationLimits(engine.max_rows, engine.max_step_tokens, engine.max_step_tokens, engine.preemption)
    return CohortBatching(config.cohort, limits, cold_chunk=engine.prefill_chunk)


def build_early_rejection(config: Config) -> EarlyRejection:
    return EarlyRejection(Colocated(), AdmissionTest(config.cohort.refuse_late), order=config.cohort.prompt_order)
