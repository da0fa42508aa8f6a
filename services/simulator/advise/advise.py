"""Which preset, tensor parallelism, roles and settings suit this traffic on this cluster, together, with the evidence.

    candidates ─▶ three looks, each of another seed, at fewer and for longer ─▶ finalists on held-out seeds, ten minutes
               ─▶ the best; among those as good capacity, then cost, then simplicity decide

All candidates of a look replay the same requests; merit is the share of SLOs kept of all sent. Seeds that ranked do not
judge: who is first among sixty by luck is not so again. The default preset reaches the last look in any case
(`judgement.py`). A look ends after so much work: that of fast traffic is shorter. A
group of devices that cannot keep the SLO even when idle is not simulated.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Literal

import msgspec

from cohort.common.errors import ConfigError
from cohort.common.policies.cost_model import ModelShape
from cohort.services.simulator.advise.candidates import Candidate, candidates, ceiling, chunked, undivided
from cohort.services.simulator.advise.judgement import Judged, choose, cost, distinct, final, kept, ranked, shortlist
from cohort.services.simulator.advise.lab import Lab, Look, Progress, Tried
from cohort.services.simulator.core.capacity import MEAN_TIMES, WINDOW_S, Capacity
from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.core.sim_options import SimOptions
from cohort.services.simulator.core.traffic import Traffic, parse_slo
from cohort.services.simulator.hardware.hardware import Cluster

DURATION_S = 600.0
"""Length of the last look."""
_LOOKS = ((40_000.0, 16), (120_000.0, 5), (300_000.0, 3))
"""Work of each look (about tokens of answers, `lab.py`), and how many candidates go on."""
_JUDGED_WORK = 700_000.0
_HELD_OUT = 3
_FIRST_HELD_OUT = 1_000
"""Offset of held-out seeds."""
_WITH_CHUNKS = 2
"""Candidates that the third look sees with other chunks, too."""
_CAPACITY_WORK = 12e6
"""Work of all searches of capacities; a search takes `_POINTS` whole points."""
_POINTS = 2.5
_HOPELESS = 0.5
"""Groups of devices are left out whose ceiling is lower than this share of the best group's."""

Stage = Literal["first look", "second look", "third look", "judged"]
_STAGES: tuple[Stage, ...] = ("first look", "second look", "third look")


class Trial(msgspec.Struct, frozen=True):
    """A candidate as far as it came. `kept`: mean of the share of SLOs kept, over the held-out seeds if it was judged;
    `seeds` each of them. `cost`: share of the time that instances compute. `why_not`: why it lost; "" of the best."""

    preset: str
    roles: dict[str, int]
    settings: list[str]
    tensor_parallel: int
    stage: Stage
    kept: float
    seeds: list[float]
    cost: float
    report: SimReport
    capacity: Capacity | None = None
    why_not: str = ""


class Advice(msgspec.Struct, frozen=True):
    """`trials` best first; `impossible`: reason → candidates that cannot run for it; `why`: what chose the first of
    equals; `judged_s`: virtual seconds of a judged run; `command` starts the best, unless `simulated_only` says why no
    live pipeline can. `without_capacity`: why none was searched."""

    trials: list[Trial]
    impossible: dict[str, list[str]]
    why: str
    command: str
    held_out: list[int]
    judged_s: float
    simulated_only: str = ""
    without_capacity: str = ""

    @property
    def best(self) -> Trial:
        return self.trials[0]


class Found(msgspec.Struct, frozen=True):
    """Advice, and all candidates that it compared, the best first."""

    advice: Advice
    best: Candidate
    all: list[Candidate]


def advise(
    options: argparse.Namespace,
    presets: list[str],
    cluster: Cluster,
    model: ModelShape,
    traffic: Traffic,
    sim_options: SimOptions,
    progress: Progress,
) -> Found:
    """Search the best candidate. Raises `ConfigError` when none can run."""
    lab = Lab(options, model, traffic, sim_options, progress)
    every = candidates(options, presets, cluster, model, lab.refuse)
    if not every:
        raise ConfigError(_nothing_runs(lab.impossible))
    with lab.processes(options.jobs):
        return _Search(lab, every).found()


class _Search:
    """The looks of one advice, and what they left behind."""

    def __init__(self, lab: Lab, every: list[Candidate]) -> None:
        self._lab, self._every = lab, every
        self._slo = parse_slo(lab.options.slo)
        self._lost: list[Trial] = []
        seed = lab.options.seed
        self._held_out = [seed + _FIRST_HELD_OUT + number for number in range(_HELD_OUT)]
        duration_s = lab.options.duration
        self._judged = Look(seed, duration_s) if duration_s else Look(seed, DURATION_S, _JUDGED_WORK)

    def found(self) -> Found:
        finalists = self._finalists(self._able())
        if not finalists:
            raise ConfigError(_nothing_runs(self._lab.impossible))
        judged = self._judge(finalists)
        chosen_from = final(judged, self._affordable(judged))
        capacities, without = self._capacities(chosen_from)
        rates = {label: capacity.rate_per_s for label, capacity in capacities.items()}
        best, why, why_not = choose(judged, rates)
        trials = [
            _trial(
                each.candidate,
                each.reports[0],
                "judged",
                why_not.get(each.candidate.label, ""),
                seeds=each.kept,
                mean_cost=each.cost,
                capacity=capacities.get(each.candidate.label),
            )
            for each in sorted(judged, key=lambda each: (each is not best, -each.mean, -each.goodput))
        ]
        lab, whole = self._lab, undivided(self._lab.model)
        advice = Advice(
            trials + self._lost,
            lab.impossible,
            why,
            command(lab.options, best.candidate, lab.model.name),
            self._held_out,
            best.reports[0].duration_s,
            whole if best.candidate.cluster.tensor_parallel > 1 else "",
            without,
        )
        others = [each for each in self._every if each != best.candidate]
        return Found(advice, best.candidate, [best.candidate, *others])

    def _able(self) -> list[Candidate]:
        """Return the candidates on devices that could keep the SLO. The others are known as impossible."""
        lab, sample = self._lab, self._lab.workload(Look(self._lab.options.seed, DURATION_S, _LOOKS[0][0])).items
        drafts = bool(lab.sim_options.acceptance or lab.sim_options.draft_rates)
        clusters = {each.cluster.tensor_parallel: each.cluster for each in self._every}
        ceilings = {size: ceiling(each, lab.model, sample, drafts=drafts) for size, each in clusters.items()}
        highest = max(ceilings.values())
        able = [each for each in self._every if ceilings[each.cluster.tensor_parallel] >= _HOPELESS * highest]
        for each in self._every:
            if each not in able:
                share = ceilings[each.cluster.tensor_parallel]
                said = f"instances of {each.cluster.tensor_parallel} keep {share:.0%} of the SLOs at most, even idle"
                lab.refuse(each.label, ConfigError(said))
        return able

    def _finalists(self, able: list[Candidate]) -> list[Candidate]:
        """Rank in looks that fewer and fewer take part in. Return those to be judged."""
        lab, seed = self._lab, self._lab.options.seed
        self._plan(len(able))
        for number, (work, most) in enumerate(_LOOKS):
            last = number == len(_LOOKS) - 1
            if last:
                able = [*able, *(each for plain in able[:_WITH_CHUNKS] for each in chunked(lab.options, plain))]
            if len(able) <= most:
                continue
            look = Look(seed + number, min(DURATION_S, self._judged.duration_s), work)
            trials = ranked(lab.look(able, look), self._slo)
            trials = distinct(trials) if last else trials
            going_on = shortlist(trials, most)
            first = kept(trials[0].report) if trials else 0.0
            losers = [
                _trial(*trial, _STAGES[number], _why_dropped(trial, first)) for trial in trials if trial not in going_on
            ]
            self._lost = losers + self._lost
            able = [candidate for candidate, _ in going_on]
        return able

    def _plan(self, count: int) -> None:
        """Estimate the work, for whoever waits."""
        lab, seed = self._lab, self._lab.options.seed
        for work, most in _LOOKS:
            if count > most:
                lab.planned += count * lab.size(Look(seed, DURATION_S, work))
            count = min(count, most + 1)
        lab.planned += count * _HELD_OUT * lab.size(self._judged) + count * _CAPACITY_WORK / 4

    def _judge(self, finalists: list[Candidate]) -> list[Judged]:
        reports: dict[str, list[SimReport]] = {each.label: [] for each in finalists}
        for seed in self._held_out:
            for candidate, report in self._lab.look(finalists, self._judged._replace(seed=seed)):
                reports[candidate.label].append(report)
        judged = [Judged(each, reports[each.label]) for each in finalists if len(reports[each.label]) == _HELD_OUT]
        if not judged:
            raise ConfigError(_nothing_runs(self._lab.impossible))
        return judged

    def _point_work(self, judged: Sequence[Judged]) -> float:
        """Estimate a capacity point's work."""
        lab = self._lab
        start = self._start(judged) or lab.load(judged[0].candidate, 0).start_per_s()
        times = [report.overall.jct_ms for each in judged for report in each.reports]
        mean_s = max((each.mean / 1e3 for each in times if each is not None), default=0.0)
        return start * max(WINDOW_S, MEAN_TIMES * mean_s) * lab.request_work

    def _start(self, judged: Sequence[Judged]) -> float | None:
        """Return the traffic's own rate, where to begin a search."""
        lab = self._lab
        own = lab.options.rate or lab.traffic.own_rate_per_s
        usual = lab.load(judged[0].candidate, 0).start_per_s()
        holds = any(each.mean >= lab.options.capacity for each in judged)
        return own if own is None else max(own, usual) if holds else min(own, usual)

    def _affordable(self, judged: Sequence[Judged]) -> int:
        return min(3, max(1, int(_CAPACITY_WORK / (_POINTS * self._point_work(judged)))))

    def _capacities(self, chosen_from: Sequence[Judged]) -> tuple[dict[str, Capacity], str]:
        """Search the capacities of these; none that would take too long."""
        size = _POINTS * self._point_work(chosen_from)
        if size > _CAPACITY_WORK:
            return (
                {},
                f"a search takes {size / 1e6:.0f} million tokens, long to simulate: cohort simulate --capacity does it",
            )
        picked = [each.candidate for each in chosen_from]
        found = self._lab.capacities(picked, self._held_out[0], self._start(chosen_from), size)
        return {candidate.label: capacity for candidate, capacity in zip(picked, found, strict=True)}, ""


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


def _trial(
    candidate: Candidate,
    report: SimReport,
    stage: Stage,
    why_not: str,
    *,
    seeds: list[float] | None = None,
    mean_cost: float | None = None,
    capacity: Capacity | None = None,
) -> Trial:
    seeds = [kept(report)] if seeds is None else seeds
    return Trial(
        candidate.preset,
        {role.value: count for role, count in candidate.roles.items()},
        list(candidate.settings),
        candidate.cluster.tensor_parallel,
        stage,
        sum(seeds) / len(seeds),
        seeds,
        cost(report) if mean_cost is None else mean_cost,
        report,
        capacity,
        why_not,
    )


def _why_dropped(trial: Tried, best: float) -> str:
    less = 100 * (best - kept(trial.report))
    return f"keeps {less:.1f} points less" if less >= 0.1 else "less slack than others"


def _nothing_runs(impossible: dict[str, list[str]]) -> str:
    if len(impossible) == 1:
        return f"no candidate can run: {next(iter(impossible))}"
    reasons = "; ".join(f"{len(of)} candidate(s): {reason}" for reason, of in impossible.items())
    return f"no candidate can run: {reasons}"
