"""Which preset, roles and settings suit this traffic on this cluster: try them, rank them, show the evidence.

Candidates are every preset, for presets with several roles every sensible split of the instances, and chunk sizes of
prefill. Each replays the same requests. Candidates are ranked by the SLOs kept of all sent, then by tokens finished in
time, then by the lower 99th percentile of the time to the first token. For the best few the capacity is searched.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from cohort.common.config import Config
from cohort.common.errors import ConfigError
from cohort.common.policies.cost_model import ModelShape
from cohort.common.types import Role
from cohort.services.simulator.cluster import SimOptions
from cohort.services.simulator.deployment import spread_roles
from cohort.services.simulator.hardware import Cluster
from cohort.services.simulator.report import SimReport
from cohort.services.simulator.run import Capacity, by_rate, find_capacity, simulate
from cohort.services.simulator.setup import configuration
from cohort.services.simulator.traffic import Traffic

_CHUNKS = (512, 2048)
_FINALISTS = 2


@dataclass(frozen=True, slots=True)
class Candidate:
    preset: str
    roles: dict[Role, int]
    settings: tuple[str, ...]

    @property
    def label(self) -> str:
        roles = ", ".join(f"{count} {role.value}" for role, count in self.roles.items())
        return f"{self.preset} ({roles}){''.join(' ' + setting for setting in self.settings)}"


class Trial(msgspec.Struct, frozen=True):
    preset: str
    roles: dict[str, int]
    settings: list[str]
    report: SimReport
    capacity: Capacity | None = None


class Advice(msgspec.Struct, frozen=True):
    """`trials` best first; `impossible`: candidate → why it cannot run."""

    trials: list[Trial]
    impossible: dict[str, str]

    @property
    def best(self) -> Trial:
        return self.trials[0]


def advise(
    options: argparse.Namespace,
    presets: list[str],
    cluster: Cluster,
    model: ModelShape,
    traffic: Traffic,
    sim_options: SimOptions,
    progress: Callable[[str], None],
) -> Advice:
    """Raises `ConfigError` when no candidate can run."""
    trials: list[tuple[Candidate, SimReport]] = []
    impossible: dict[str, str] = {}
    for preset in presets:
        try:
            base = configuration(options, preset)
            candidates = list(_candidates(base, preset, cluster.instances))
        except ConfigError as error:
            impossible[preset] = str(error)
            continue
        for candidate in candidates:
            progress(candidate.label)
            try:
                config = configuration(options, preset, candidate.settings)
                workload = traffic.workload(options.rate)
                trials.append((candidate, simulate(config, cluster, model, workload, sim_options, candidate.roles)))
            except ConfigError as error:
                impossible[candidate.label] = str(error)
    if not trials:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in impossible.items())
        raise ConfigError(f"no preset can run this: {reasons}")
    trials.sort(key=lambda trial: _merit(trial[1]), reverse=True)
    start = options.rate or traffic.own_rate_per_s or trials[0][1].overall.requests_per_s
    ranked = []
    for place, (candidate, report) in enumerate(trials):
        capacity = None
        if place < _FINALISTS:
            progress(f"capacity of {candidate.label}")
            config = configuration(options, candidate.preset, candidate.settings)
            at_rate = by_rate(config, cluster, model, traffic, sim_options, candidate.roles)
            capacity = find_capacity(at_rate, start, options.capacity, tolerance=0.1)
        roles = {role.value: count for role, count in candidate.roles.items()}
        ranked.append(Trial(candidate.preset, roles, list(candidate.settings), report, capacity))
    return Advice(ranked, impossible)


def _candidates(base: Config, preset: str, instances: int) -> Iterator[Candidate]:
    for chunk in _CHUNKS:
        settings = (f"engine.prefill_chunk={chunk}", f"engine.max_step_tokens={max(chunk, 2048)}")
        for roles in _splits(base, instances):
            yield Candidate(preset, roles, settings)


def _splits(base: Config, instances: int) -> Iterator[dict[Role, int]]:
    """The preset's own shares, and for prefill beside decode a quarter and three quarters too."""
    own = spread_roles(base, instances)
    yield own
    if set(own) == {Role.PREFILL, Role.DECODE}:
        for prefills in sorted({max(1, instances // 4), max(1, 3 * instances // 4)} - {own[Role.PREFILL]}):
            if prefills < instances:
                yield {Role.PREFILL: prefills, Role.DECODE: instances - prefills}


def _merit(report: SimReport) -> tuple[float, float, float]:
    whole = report.overall
    kept = round(whole.slo.kept_of_sent, 3) if whole.slo else 0.0
    goodput = whole.slo.goodput_tokens_per_s if whole.slo else whole.output_tokens_per_s
    return (kept, round(goodput, 1), -(whole.ttft_ms.p99 if whole.ttft_ms else float("inf")))
