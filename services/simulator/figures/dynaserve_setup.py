"""DynaServe §6.1 as simulations: workloads, systems, model scales, and the search for a capacity.

Choices that the paper leaves open, made here for all systems alike:

    lengths      rows of the public traces that ship, drawn with replacement; of BurstGPT's 1.4 million the first 268,
                 nearly all conversations. Mini Reasoning is Table 1's shape, 219 + 1467
    mixing       iterations with prompts and decodes take `MIXED_SHARE` longer, fitted to Table 1 (`baselines`)
    capacity     the highest Poisson rate at which 99 % of the requests have no gap beyond 100 ms (so the paper counts
                 it: 1 % of requests may violate the bound), with a median TTFT of at most 2 s (Sarathi-Serve's
                 bound on the scheduling delay, whose definition of capacity the paper follows), and `_MIN_FINISHED` of
                 what arrives finished at the rate it arrives
    colocated    `baseline-chunked-prefill`, instances in turn, the best of the chunks 256 … 2,048 for each workload
    disaggregated  `baseline-distserve` with recomputation, 1P + 1D
    routing      DynaServe chooses the pair by load, as its preset does; the paper routes round-robin
    answers      of the hybrid workload of Table 2: as long as its goodput over its capacity says, `HYBRID_ANSWER`
                 tokens on average (68.8, 67.7 and 64.0 for its three systems); the traces' own are twice that, and
                 shown beside
    predictions  normal errors of 10 tokens (the paper: 95 % within ± 20)
    links        NVLink between the instances
    memory       nine tenths of a device hold weights, workspace and KV, as in vLLM

Nothing here tunes anything but the baseline's chunk; `MIXED_SHARE` and `HYBRID_ANSWER` were chosen by figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean
from typing import Any

from cohort.common.config import load_config
from cohort.common.policies.interface import Placement
from cohort.common.workloads.arrivals import AllAtOnce, Arrivals, RandomArrivals
from cohort.common.workloads.changes import mixture, with_slos
from cohort.common.workloads.generate import FromTrace, generate
from cohort.common.workloads.items import Workload
from cohort.common.workloads.papers import paper_workload
from cohort.common.workloads.slos import dynaserve as slo_of
from cohort.common.workloads.trace_files import shipped_file
from cohort.common.workloads.traces import read_trace
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.core.run import simulate
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.figures.baselines import MIXED_SHARE
from cohort.services.simulator.figures.figure import Lab
from cohort.services.simulator.hardware.hardware import load_cluster, load_model

_WITHIN_BOUND = 0.99
"""Share of ended requests without a gap beyond their bound."""
_TTFT_MS = 2000.0
_MIN_FINISHED = 0.8
"""Coarse: a window cuts answers at both ends, and rates below it grow without end within the window."""
_CHUNKS = (256, 512, 1024, 2048)
_STEP = 1.07
"""Factor to within which capacities are found."""
_FAR = 36
"""Number of steps below the start at which a search gives up; more than a factor of ten."""

HYBRID, TRACED_HYBRID = "hybrid-table-2", "hybrid"
HYBRID_ANSWER = 66.8
_START: Mapping[str, float] = {
    "azure-code": 6.0,
    "burstgpt": 9.0,
    "arxiv": 3.5,
    "reasoning": 2.5,
    TRACED_HYBRID: 7.0,
    HYBRID: 7.0,
}
_TRACES: Mapping[str, str] = {
    "azure-code": "azure2023_code",
    "burstgpt": "burstgpt1_head",
    "arxiv": "arxiv_summarization_4k",
}
COLOCATED, DISAGGREGATED, SPLIT = "baseline-chunked-prefill", "baseline-distserve", "dynaserve"


@dataclass(frozen=True)
class Scale:
    """Two instances of a model on `devices` A100-80GB each."""

    model: str
    devices: int
    stack: str = "graphs"


SMALL = Scale("qwen2.5-14b", 1)


@dataclass(frozen=True)
class System:
    preset: str
    chunk: int = 2048
    settings: tuple[tuple[str, str, Any], ...] = ()

    def overrides(self, kv_bytes: int) -> dict[str, Any]:
        found: dict[str, Any] = {
            "engine": {
                "max_rows": 256,
                "max_step_tokens": self.chunk,
                "prefill_chunk": self.chunk,
                "preemption": "recompute",
            },
            "kv": {"memory_bytes": kv_bytes, "prefix_caching": False},
        }
        if self.preset == COLOCATED:
            found["policies"] = {"placement": "colocated_in_turn"}
        for section, option, value in self.settings:
            target = found
            for name in section.split("."):
                target = target.setdefault(name, {})
            target[option] = value
        return found


DYNASERVE = System(SPLIT)
AS_PRINTED = System(
    SPLIT,
    settings=tuple(
        ("experiment.dynaserve", *changed)
        for changed in (("balance", "end"), ("await_arrivals", False), ("whole_where_idle", False))
    ),
)
"""DynaServe by Alg. 1 as printed: predicted ends are balanced, and a split need not wait for load."""


# -- workloads -------------------------------------------------------------------------------------------------------


@cache
def _rows(name: str) -> FromTrace:
    return FromTrace(read_trace(shipped_file(_TRACES[name])), name, resample=True)


def _lengths(name: str, arrivals: Arrivals, count: int, seed: int) -> Workload:
    if name in _TRACES:
        return generate(name, _rows(name), arrivals, count=count, seed=seed)
    return paper_workload(f"dynaserve-{name}", arrivals, count=count, seed=seed)


def workload(name: str, rate: float, end_s: float, cv: float = 1.0, *, seed: int = 0) -> Workload:
    """Make a named workload. `cv`: variation of the gaps between arrivals, 1 = Poisson."""
    count = round(1.3 * rate * end_s) + 20
    if name in (HYBRID, TRACED_HYBRID):
        parts = [(1.0, _lengths(part, AllAtOnce(), count, seed)) for part in ("burstgpt", "azure-code")]
        found = mixture(name, parts, RandomArrivals(rate, cv), count=count, seed=seed)
        if name == HYBRID:
            found = _answers_of(found, HYBRID_ANSWER)
    else:
        found = _lengths(name, RandomArrivals(rate, cv), count, seed)
    return with_slos(found, slo_of)


def _answers_of(found: Workload, mean: float) -> Workload:
    """Scale all answers by one factor, to this mean."""
    factor = mean / fmean(item.output_tokens for item in found.items)
    items = (replace(item, output_tokens=max(1, round(factor * item.output_tokens))) for item in found.items)
    return replace(found, items=tuple(items))


def rate_of(name: str, step: int) -> float:
    """Return the rate of a step, the same for all systems: equal capacities come out equal."""
    return float(_START[name] * _STEP**step)


def times(name: str) -> tuple[float, float]:
    """Return warm-up and end: as long as answers take, and again; those of Mini Reasoning take a minute and more."""
    return {"azure-code": (20.0, 70.0), "reasoning": (100.0, 180.0)}.get(name, (40.0, 90.0))


# -- simulations -----------------------------------------------------------------------------------------------------


def simulated(
    system: System,
    found: Workload,
    options: SimOptions,
    placement: Placement | None = None,
    *,
    across: bool = False,
    scale: Scale = SMALL,
) -> SimReport:
    overrides: dict[str, Any] = {"tensor_parallel": scale.devices, "stack": scale.stack, "mixed_share": MIXED_SHARE}
    cluster = load_cluster("a100-80:2", overrides | ({"per_host": 1} if across else {}))
    model = load_model(scale.model)
    devices_bytes = scale.devices * (int(0.9 * cluster.device.memory_bytes) - cluster.device_reserve_bytes)
    config = load_config(preset=system.preset, overrides=system.overrides(devices_bytes - model.weights_total_bytes))
    return simulate(config, cluster, model, found, options, placement=placement)


def run(lab: Lab, system: System, name: str, rate: float, scale: Scale = SMALL, cv: float = 1.0) -> SimReport:
    warmup_s, end_s = times(name)

    def simulation() -> SimReport:
        options = lab.options(predictor="noisy", predictor_sigma=10.0, warmup_s=warmup_s, horizon_s=end_s)
        return simulated(system, workload(name, rate, end_s, cv, seed=lab.seed), options, scale=scale)

    return lab.run((system, name, rate, scale, cv), simulation)


def split_share(report: SimReport) -> float:
    split, whole = report.manager["splits_total"], report.manager["whole_total"]
    return 100.0 * split / max(split + whole, 1.0)


def within_per_s(report: SimReport) -> float:
    """Return the goodput: output tokens a second that came within the bound of the one before, of all drawn in the
    window. (The report counts answers that ended in it: more where decodes speed up before a steady state.)"""
    decoded_per_s = sum(instance.decode_tokens for instance in report.instances) / report.duration_s
    return decoded_per_s * (report.overall.slo.tbt if report.overall.slo else 0.0)


# -- capacity --------------------------------------------------------------------------------------------------------


def keeps_up(lab: Lab, system: System, name: str, rate: float, scale: Scale = SMALL) -> bool:
    overall = run(lab, system, name, rate, scale).overall
    slo, ttft = overall.slo, overall.ttft_ms
    if slo is None or ttft is None or overall.finished < _MIN_FINISHED * overall.sent:
        return False
    return slo.gaps >= _WITHIN_BOUND and ttft.p50 <= _TTFT_MS


def highest(lab: Lab, system: System, name: str, above: int = -_FAR, scale: Scale = SMALL) -> int:
    """Find the highest step beyond `above` whose rate this system keeps up with; `above` if there is none."""
    good, probe = above, max(0, above + 1)
    while keeps_up(lab, system, name, rate_of(name, probe), scale):
        good, probe = probe, probe + 4
    bad = probe
    while bad - good > 1:
        # Below the start, first in equal steps: the answer is near.
        probe = bad - 4 if good == -_FAR and bad - good > 4 else (good + bad) // 2
        if keeps_up(lab, system, name, rate_of(name, probe), scale):
            good = probe
        else:
            bad = probe
    return good


def tuned(lab: Lab, name: str, scale: Scale = SMALL) -> tuple[System, int]:
    """Find the best chunk of the colocated baseline: each next one must first beat the best so far."""
    best = System(COLOCATED, 512)
    step = highest(lab, best, name, scale=scale)
    for chunk in _CHUNKS:
        system = System(COLOCATED, chunk)
        if chunk != best.chunk and keeps_up(lab, system, name, rate_of(name, step + 1), scale):
            best, step = system, highest(lab, system, name, step, scale)
    return best, step


def capacity(lab: Lab, preset: str, name: str, scale: Scale = SMALL) -> float:
    """Return the capacity in requests a second; of the colocated baseline with its best chunk."""
    if preset == COLOCATED:
        return rate_of(name, tuned(lab, name, scale)[1])
    return rate_of(name, highest(lab, System(preset), name, scale=scale))


def goodput_at(lab: Lab, preset: str, name: str, rate: float, scale: Scale = SMALL, cv: float = 1.0) -> float:
    """Return the goodput; of the colocated baseline with the chunk that is best at this rate."""
    systems = [System(COLOCATED, chunk) for chunk in _CHUNKS] if preset == COLOCATED else [System(preset)]
    return max(within_per_s(run(lab, system, name, rate, scale, cv)) for system in systems)
