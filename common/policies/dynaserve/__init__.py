"""DynaServe: requests split at any token over unified workers, batches under a bound on the time between tokens.

kv_forecast     what the cache will have to hold at worst (D5)
slo_batching    the worker's scheduler (D5, Alg. 2)
timeline        an instance's future in virtual passes (D4)
instance_work   what is on an instance, from reports and what was sent since (D4)
split_search    the bounded binary search for the split (D3, Alg. 1)
split_gain      what a split is worth while requests keep coming, and the work that it saves (D3)
split_placement the manager's placement (D1–D3, D7, D8)
pressure_gate   dispatches nothing while every instance's decodes alone exceed their bound

What iterations take is learned by `step_times`, shared with other systems.
"""

from __future__ import annotations

from cohort.common.config import Config
from cohort.common.policies.baselines.batch_builder import IterationLimits
from cohort.common.policies.dynaserve.pressure_gate import PressureGate
from cohort.common.policies.dynaserve.slo_batching import SloBatching
from cohort.common.policies.dynaserve.split_placement import SplitPlacement
from cohort.common.policies.settings import DynaServeSettings, settings_of


def build_placement(config: Config) -> SplitPlacement:
    settings = settings_of(config, DynaServeSettings)
    return SplitPlacement(settings, default_output=float(config.gateway.default_prediction_tokens))


def build_prefill_order(config: Config) -> PressureGate:
    settings = settings_of(config, DynaServeSettings)
    return PressureGate(settings, dispatch_ahead_tokens=config.manager.dispatch_ahead_tokens)


def build_iteration(config: Config) -> SloBatching:
    engine = config.engine
    limits = IterationLimits(engine.max_rows, engine.max_step_tokens, engine.max_step_tokens, engine.preemption)
    settings = settings_of(config, DynaServeSettings)
    return SloBatching(settings, limits, cold_chunk=engine.prefill_chunk)
