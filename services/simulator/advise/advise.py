"""Which preset, tensor parallelism, roles and settings suit this traffic on this cluster, together, with the evidence.

    candidates ─▶ a first look at all, on a part of the requests ─▶ the best of them, with chunk sizes, on all requests
               ─▶ those that are as good as the best: capacity, then cost, then simplicity decide

Candidates are presets, for presets with several roles splits of the instances, and groups of devices where the cluster
has such. All replay the same requests; merit is the share of SLOs kept of all sent, then tokens finished in time, then
the 99th percentile of the time to the first token. The default preset reaches the second look in any case. A reason
that keeps candidates from running is said once, with all that it keeps.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import NamedTuple

import msgspec

from cohort.common.config import CONFIGS_DIR, Config
from cohort.common.errors import ConfigError
from cohort.common.policies.compose import groups_layers
from cohort.common.policies.cost_model import ModelShape
from cohort.common.types import Role
from cohort.common.workloads.items import Workload
from cohort.services.simulator.core.deployment import kv_blocks, spread_roles
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.core.run import Capacity, find_capacity, simulate
from cohort.services.simulator.core.setup import configuration
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.core.traffic import Traffic
from cohort.services.simulator.hardware.data_files import read_yaml
from cohort.services.simulator.hardware.hardware import Cluster, as_stored

DEFAULT_PRESET = Config().name
_CHUNKS = (512, 2048)
_GROUPS = (1, 2, 4, 8)
_COLUMNS_OF_CODES = 32
"""Columns of an expert in MXFP4 that share a scale: `MXFP4_GROUP` of the engine, whose code is not imported here."""
_PREFILL_SHARES = (0.125, 0.25, 0.5, 0.75, 0.875)
_FIRST_SHARE, _FEWEST = 0.25, 50
"""Share of the requests that a first look replays, and how many at least."""
_MAX_WHOLE = 8
_FINALISTS = 4
_EQUAL_MET, _EQUAL_GOODPUT = 0.005, 0.02
"""Candidates this near to the best are as good: one seed says no more."""
_EQUAL = 0.1
"""The same for capacities, whose search ends there, and for costs."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """`cluster`: with the instances that groups of `tensor_parallel` devices make."""

    preset: str
    cluster: Cluster
    roles: dict[Role, int]
    settings: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        roles = ", ".join(f"{count} {role.value}" for role, count in self.roles.items())
        group = f" x {self.cluster.tensor_parallel} devices" if self.cluster.tensor_parallel > 1 else ""
        return f"{self.preset} ({roles}{group}){''.join(' ' + setting for setting in self.settings)}"

    @property
    def simplicity(self) -> tuple[int, int, bool, int, int, str]:
        """Sort key, smaller is simpler: devices of a group, settings, not the default preset, roles, options."""
        other = self.preset != DEFAULT_PRESET
        return (
            self.cluster.tensor_parallel,
            len(self.settings),
            other,
            len(self.roles),
            _options_of(self.preset),
            self.preset,
        )


class Tried(NamedTuple):
    candidate: Candidate
    report: SimReport


class Trial(msgspec.Struct, frozen=True):
    """`whole` false: a first look only, on fewer requests. `cost`: share of the time that instances compute."""

    preset: str
    roles: dict[str, int]
    settings: list[str]
    report: SimReport
    capacity: Capacity | None = None
    tensor_parallel: int = 1
    whole: bool = True
    cost: float = 0.0


class Advice(msgspec.Struct, frozen=True):
    """`trials` best first; `impossible`: reason → candidates that cannot run for it; `why`: what chose the first of
    equals; `command` starts it, unless `simulated_only` says why no live pipeline can."""

    trials: list[Trial]
    impossible: dict[str, list[str]]
    why: str
    command: str
    simulated_only: str = ""

    @property
    def best(self) -> Trial:
        return self.trials[0]


@dataclass(slots=True)
class _Run:
    """The search: what all candidates have in common, and why some cannot run."""

    options: argparse.Namespace
    model: ModelShape
    traffic: Traffic
    sim_options: SimOptions
    progress: Callable[[str], None]
    impossible: dict[str, list[str]] = field(default_factory=dict)

    def config(self, candidate: Candidate) -> Config:
        return configuration(self.options, candidate.preset, candidate.settings)

    def cannot(self, label: str, error: ConfigError) -> None:
        self.impossible.setdefault(str(error), []).append(label)

    def reports(self, candidates: Iterable[Candidate], requests: int | None) -> list[Tried]:
        """Simulate the candidates on the first `requests` (None: all). Return them best first."""
        workload = self.traffic.workload(self.options.rate)
        if requests is not None:
            workload = replace(workload, items=workload.items[:requests])
        found = []
        for candidate in candidates:
            self.progress(candidate.label)
            try:
                report = self._simulate(candidate, workload)
            except ConfigError as error:
                self.cannot(candidate.label, error)
            else:
                found.append(Tried(candidate, report))
        return sorted(found, key=lambda trial: _merit(trial.report), reverse=True)

    def capacity(self, candidate: Candidate, start_per_s: float) -> Capacity:
        self.progress(f"capacity of {candidate.label}")

        def at_rate(rate: float) -> SimReport:
            return self._simulate(candidate, self.traffic.workload(rate))

        return find_capacity(at_rate, start_per_s, self.options.capacity, tolerance=_EQUAL)

    def _simulate(self, candidate: Candidate, workload: Workload) -> SimReport:
        config = self.config(candidate)
        return simulate(config, candidate.cluster, self.model, workload, self.sim_options, candidate.roles)


def advise(
    options: argparse.Namespace,
    presets: list[str],
    cluster: Cluster,
    model: ModelShape,
    traffic: Traffic,
    sim_options: SimOptions,
    progress: Callable[[str], None],
) -> Advice:
    """Search the best candidate. Raises `ConfigError` when none can run."""
    run = _Run(options, model, traffic, sim_options, progress)
    fixed = options.tensor_parallel is not None
    whole = undivided(model)
    if whole and not fixed and len(groups(cluster, model, fixed=False)) > 1:
        run.cannot("groups of devices", ConfigError(f"{whole}; --tensor-parallel N simulates groups of N all the same"))
    candidates = [
        candidate
        for grouped in groups(cluster, model, fixed=fixed or bool(whole))
        for preset in presets
        for candidate in _candidates(run, preset, grouped)
    ]
    firsts: list[Tried] = []
    if len(candidates) > _MAX_WHOLE:
        count = len(traffic.workload(options.rate).items)
        firsts = run.reports(candidates, max(_FEWEST, round(_FIRST_SHARE * count)))
        candidates = shortlist([first.candidate for first in firsts])
    trials = distinct(run.reports((each for candidate in candidates for each in _chunked(run, candidate)), None))
    if not trials:
        raise ConfigError(_nothing_runs(run.impossible))
    start = options.rate or traffic.own_rate_per_s or trials[0].report.overall.requests_per_s
    capacities = {candidate.label: run.capacity(candidate, start) for candidate, _ in final(trials)}
    best, why = choose(trials, {name: found.rate_per_s for name, found in capacities.items()})
    trials.sort(key=lambda trial: trial.candidate is not best)
    seen = {(candidate.preset, candidate.label) for candidate, _ in trials}
    others = [trial for trial in firsts if (trial.candidate.preset, trial.candidate.label) not in seen]
    return Advice(
        [_trial(candidate, report, capacities.get(candidate.label), whole=True) for candidate, report in trials]
        + [_trial(candidate, report, None, whole=False) for candidate, report in others],
        run.impossible,
        why,
        command(options, best, model.name),
        whole if best.cluster.tensor_parallel > 1 else "",
    )


# -- candidates ------------------------------------------------------------------------------------------------------


def undivided(model: ModelShape) -> str:
    """Return why no live worker computes this model on several devices, as far as its shape shows
    (`rank_shares.hindrance` reads its configuration); "" where one does."""
    return "" if model.gated_mlp else f"{model.name} is not Llama-shaped, which live workers do not divide over devices"


def groups(cluster: Cluster, model: ModelShape, *, fixed: bool) -> list[Cluster]:
    """Return the cluster with its devices in groups of every size that host and heads allow; unchanged where its groups
    are given, or it has no links for them (CPUs, unlike instances)."""
    if fixed or cluster.cpu or cluster.parts:
        return [cluster]
    devices, own = cluster.instances * cluster.tensor_parallel, cluster.tensor_parallel
    host = (cluster.per_host or cluster.instances) * own
    return [
        msgspec.structs.replace(
            cluster, instances=devices // size, tensor_parallel=size, per_host=cluster.per_host * own // size
        )
        for size in sorted({*_GROUPS, own})
        if host % size == 0 and devices % size == 0 and _divides(model, size)
    ]


def _divides(model: ModelShape, size: int) -> bool:
    """Check heads, of which KV heads may be copied, and experts' columns: codes divide by whole groups that share a
    scale, of which some devices have one more."""
    copied = model.kv_heads % size == 0 or size % model.kv_heads == 0
    if model.expert_bits and model.expert_intermediate // _COLUMNS_OF_CODES < size:
        return False
    columns = 0 if model.expert_bits else model.expert_intermediate
    return copied and not any(each % size for each in (model.heads, columns, model.shared_intermediate))


def _candidates(run: _Run, preset: str, cluster: Cluster) -> Iterator[Candidate]:
    try:
        config = configuration(run.options, preset)
        model = as_stored(run.model, config, cluster)
        geometry = model.kv_geometry(config.kv.block_size, grouped=groups_layers(config))
        kv_blocks(config, cluster, model, geometry)
        splits = list(_splits(config, cluster.instances))
    except ConfigError as error:
        run.cannot(preset, error)
        return
    for roles in splits:
        yield Candidate(preset, cluster, roles)


def _splits(base: Config, instances: int) -> Iterator[dict[Role, int]]:
    """Yield the preset's own shares, and for prefill beside decode others too."""
    own = spread_roles(base, instances)
    yield own
    if set(own) == {Role.PREFILL, Role.DECODE}:
        counts = {min(instances - 1, max(1, round(share * instances))) for share in _PREFILL_SHARES}
        for prefills in sorted(counts - {own[Role.PREFILL]}):
            yield {Role.PREFILL: prefills, Role.DECODE: instances - prefills}


def _chunked(run: _Run, candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with the preset's chunks of prompts, and with others."""
    yield candidate
    own = run.config(candidate).engine
    for chunk in _CHUNKS:
        if chunk != own.prefill_chunk:
            settings = [f"engine.prefill_chunk={chunk}"]
            if chunk > own.max_step_tokens:
                settings.append(f"engine.max_step_tokens={chunk}")
            yield replace(candidate, settings=tuple(settings))


def shortlist(ranked: Sequence[Candidate]) -> list[Candidate]:
    """Return the best candidates, at most two splits of a preset and group; the default preset's best always."""
    found: list[Candidate] = []
    for candidate in ranked:
        same = [each for each in found if (each.preset, each.cluster) == (candidate.preset, candidate.cluster)]
        if len(same) < 2 and len(found) < _MAX_WHOLE:
            found.append(candidate)
    default = next((each for each in ranked if each.preset == DEFAULT_PRESET), None)
    return found if default is None or default in found else [*found, default]


def distinct(trials: Sequence[Tried]) -> list[Tried]:
    """Return the trials without those whose settings change nothing: their preset ignores them."""
    plain = [(candidate, report.overall) for candidate, report in trials if not candidate.settings]
    return [
        trial
        for trial in trials
        if not trial.candidate.settings or (replace(trial.candidate, settings=()), trial.report.overall) not in plain
    ]


@cache
def _options_of(preset: str) -> int:
    """Count the options that the preset's file sets; 0 where there is none."""
    path = CONFIGS_DIR / "presets" / f"{preset}.yaml"
    sections = read_yaml(path).values() if path.is_file() else ()
    return sum(len(section) if isinstance(section, dict) else 1 for section in sections)


# -- the choice ------------------------------------------------------------------------------------------------------


def as_good(trials: Sequence[Tried]) -> list[Tried]:
    """Return the trials that the best one does not beat by more than one seed can show."""
    met, goodput, _ = _merit(trials[0].report)
    merits = [(trial, _merit(trial.report)) for trial in trials]
    least_met, least_goodput = met - _EQUAL_MET, goodput * (1.0 - _EQUAL_GOODPUT)
    return [trial for trial, merit in merits if merit[0] >= least_met and merit[1] >= least_goodput]


def final(trials: Sequence[Tried]) -> list[Tried]:
    """Return the trials whose capacity is searched: each preset's least busy; the default preset's if as good."""
    found: dict[str, Tried] = {}
    for trial in sorted(as_good(trials), key=lambda each: (round(_cost(each.report), 2), each.candidate.simplicity)):
        found.setdefault(trial.candidate.preset, trial)
    chosen = list(found.values())[:_FINALISTS]
    default = found.get(DEFAULT_PRESET)
    return chosen if default is None or default in chosen else [*chosen, default]


def choose(trials: Sequence[Tried], capacities: dict[str, float]) -> tuple[Candidate, str]:
    """Choose among those that are as good as the best and whose capacity is known: by capacity, then cost, then
    simplicity. Return the reason, too."""
    known = [trial for trial in as_good(trials) if trial.candidate.label in capacities]
    others = len(as_good(trials)) - 1
    if not others:
        return known[0].candidate, "no other candidate keeps as much"
    why = f"{others} other{'s' if others > 1 else ''} as good here; it has "
    most = max(capacities[candidate.label] for candidate, _ in known)
    able = [trial for trial in known if capacities[trial.candidate.label] >= (1.0 - _EQUAL) * most]
    if len(able) == 1:
        return able[0].candidate, why + "the highest capacity"
    least = min(_cost(report) for _, report in able)
    cheap = [trial for trial in able if _cost(trial.report) <= (1.0 + _EQUAL) * least]
    if len(cheap) == 1:
        return cheap[0].candidate, why + "no less capacity, and computes least"
    simplest = min(cheap, key=lambda trial: trial.candidate.simplicity).candidate
    return simplest, why + "no less capacity, costs no more and is simplest"


def command(options: argparse.Namespace, best: Candidate, model: str) -> str:
    """Return the command that starts it, workers included, if the model lies in a folder of its name."""
    group = best.cluster.tensor_parallel
    ranks = f", tensor_parallel: {group}" if group > 1 else ""
    workers = ", ".join(f"{{role: {role.value}, count: {count}{ranks}}}" for role, count in best.roles.items())
    threads = best.cluster.profile.threads if best.cluster.profile is not None and best.cluster.cpu else 0
    own = [f"engine.threads={threads}"] if threads else []
    parts = [f"cohort serve --model ~/models/{model} --preset {best.preset} --set 'workers=[{workers}]'"]
    parts += [f"--config {file}" for file in options.config]
    parts += [f"--set {text}" for text in (*options.set, *best.settings, *own)]
    return " ".join(parts)


def _trial(candidate: Candidate, report: SimReport, capacity: Capacity | None, *, whole: bool) -> Trial:
    roles = {role.value: count for role, count in candidate.roles.items()}
    group = candidate.cluster.tensor_parallel
    return Trial(candidate.preset, roles, list(candidate.settings), report, capacity, group, whole, _cost(report))


def _cost(report: SimReport) -> float:
    """Return the share of time in which instances compute for this traffic: another request would have to share it."""
    return sum(instance.busy for instance in report.instances) / len(report.instances)


def _merit(report: SimReport) -> tuple[float, float, float]:
    whole = report.overall
    met = round(whole.slo.kept_of_sent, 3) if whole.slo else 0.0
    goodput = whole.slo.goodput_tokens_per_s if whole.slo else whole.output_tokens_per_s
    return (met, round(goodput, 1), -(whole.ttft_ms.p99 if whole.ttft_ms else float("inf")))


def _nothing_runs(impossible: dict[str, list[str]]) -> str:
    if len(impossible) == 1:
        return f"no candidate can run: {next(iter(impossible))}"
    reasons = "; ".join(f"{len(of)} candidate(s): {reason}" for reason, of in impossible.items())
    return f"no candidate can run: {reasons}"
