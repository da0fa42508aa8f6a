"""What is asked of a simulation beside configuration, cluster and workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cohort.common.policies.cost_model import ModelShape
from cohort.common.types import IfLate
from cohort.services.simulator.hardware.acceptance import DraftRates

PredictorKind = Literal["oracle", "noisy", "lognormal", "none"]
"""Predictor: exact; normal errors of `sigma` tokens; errors by a log-normal factor of `sigma`; or none."""


@dataclass(frozen=True, slots=True)
class SimOptions:
    """`max_tokens`: what clients ask for at most; 0 = what the context leaves. `horizon_s`: virtual time after which
    the run ends even if requests are left. `warmup_s`: metrics count from then on."""

    seed: int = 0
    predictor: PredictorKind = "oracle"
    predictor_sigma: float = 0.0
    max_tokens: int = 0
    horizon_s: float = float("inf")
    warmup_s: float = 0.0
    jump: bool = True
    slo_defaults: bool = False
    """Whether real-time requests without an SLO get the gateway's default, as live ones do (`cohort simulate`,
    `advise`). Otherwise an SLO is what the workload says and nothing else, as in the papers' figures."""
    if_late: IfLate = "refuse"
    """Preference of clients whose TTFT SLO cannot be kept. Only placements that test for it ask."""
    scatter: float | None = None
    """Coefficient of variation of an iteration's time; None: each instance's own, as profiled."""
    blocking_transfers: bool = False
    """Whether an instance computes nothing while KV arrives: the next iteration takes that much longer, as in engines
    whose decode loop waits for KV transfers."""
    acceptance: float = 0.0
    """Chance that a drafted token is right (with a `speculation.mode`), mean of requests, which differ."""
    draft_rates: tuple[DraftRates, ...] = ()
    """Rates of a recorded worker's requests, instead of a mean."""
    draft_model: ModelShape | None = None
    """Draft model, with `speculation.mode` model: every draft is its own then."""
    draft_s: float = 0.0
    """Time of one draft of each row, without a `draft_model`."""
    adapter_load_s: float = 0.1
    """Time that an instance takes to load a LoRA adapter of the workload."""
    profiled: bool = True
    """Whether schedulers that learn step times start from a profile of their instance, as after `cohort profile`."""
