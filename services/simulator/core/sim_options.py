"""What is asked of a simulation beside configuration, cluster and workload."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cohort.common.policies.cost_model import ModelShape
from cohort.common.types import IfLate
from cohort.services.simulator.hardware.acceptance import DraftRates

PredictorKind = Literal["oracle", "noisy", "lognormal", "none"]
"""The true length; with normal errors of `sigma` tokens; with errors by a log-normal factor of `sigma`; silence."""


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
    """Real-time requests that name no SLO get the gateway's default, as live ones do (`cohort simulate`, `advise`).
    Without: an SLO is what the workload says and nothing else, as in the papers' figures."""
    if_late: IfLate = "refuse"
    """What clients with a TTFT SLO prefer where it cannot be kept. Only placements that test for it ask."""
    scatter: float | None = None
    """Coefficient of variation of an iteration's time; None: each instance's own, as profiled."""
    blocking_transfers: bool = False
    """An instance computes nothing while KV arrives: the next iteration takes that much longer, as in engines whose
    decode loop itself waits for KV transfers."""
    acceptance: float = 0.0
    """Where the configuration lets rows carry drafts (`speculation.mode`): the chance of a drafted token to be right,
    on average over requests, which differ (`acceptance.py`)."""
    draft_rates: tuple[DraftRates, ...] = ()
    """The same of a recorded worker's requests, in the place of a mean."""
    draft_model: ModelShape | None = None
    """With `speculation.mode` model: the one that drafts. Every draft is its own then."""
    draft_s: float = 0.0
    """The same by what one draft of each row takes, where no shape says it."""
    adapter_load_s: float = 0.1
    """What an instance takes to load a LoRA adapter of the workload."""
    profiled: bool = True
    """Schedulers that learn step times start from a profile of their instance, as after `cohort profile`."""
