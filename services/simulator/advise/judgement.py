"""Which set-up is the best one: order within a look, who goes on to the next, the choice from held-out seeds.

    rank: share of SLOs kept of all sent, then tokens in time, then how near times come to the SLO
    choose: the highest share over the held-out seeds; a baseline only if it beats the default preset on every seed;
            among those as good: capacity, then cost, then simplicity

Pure functions of reports.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from cohort.common.types import Slo
from cohort.services.simulator.advise.candidates import BASELINE, DEFAULT_PRESET, Candidate
from cohort.services.simulator.advise.lab import Tried
from cohort.services.simulator.core.report import SimReport

_FINALISTS = 3
_EQUAL_MET, _EQUAL_GOODPUT = 0.005, 0.02
"""Candidates this near to the best are as good."""
_EQUAL = 0.1
"""The same for capacities, whose search ends there, and for costs."""


class Judged(NamedTuple):
    """A candidate's reports, one of each held-out seed."""

    candidate: Candidate
    reports: list[SimReport]

    @property
    def kept(self) -> list[float]:
        return [kept(report) for report in self.reports]

    @property
    def mean(self) -> float:
        return sum(self.kept) / len(self.reports)

    @property
    def goodput(self) -> float:
        return sum(_goodput(report) for report in self.reports) / len(self.reports)

    @property
    def cost(self) -> float:
        return sum(cost(report) for report in self.reports) / len(self.reports)

    def beats(self, other: Judged) -> bool:
        """Compare: true if it keeps more on every seed, and more in the mean than is equal."""
        every = all(mine > theirs for mine, theirs in zip(self.kept, other.kept, strict=True))
        return every and self.mean - other.mean > _EQUAL_MET


class Choice(NamedTuple):
    """`why_not`: label → reason of every judged candidate that lost."""

    best: Judged
    why: str
    why_not: dict[str, str]


def kept(report: SimReport) -> float:
    return report.overall.slo.kept_of_sent if report.overall.slo else 0.0


def _goodput(report: SimReport) -> float:
    whole = report.overall
    return whole.slo.goodput_tokens_per_s if whole.slo else whole.output_tokens_per_s


def cost(report: SimReport) -> float:
    """Return the share of time in which instances compute for this traffic: another request would have to share it."""
    return sum(instance.busy for instance in report.instances) / len(report.instances)


def ranked(trials: Sequence[Tried], slo: Slo) -> list[Tried]:
    """Return the trials of a look, best first. `slo`: of most requests."""

    def merit(trial: Tried) -> tuple[float, float, float]:
        return round(kept(trial.report), 3), round(_goodput(trial.report), 1), -pressure(trial.report, slo)

    return sorted(trials, key=merit, reverse=True)


def pressure(report: SimReport, slo: Slo) -> float:
    """Return how near the 99th percentiles come to the SLO: 1 where one of them is the SLO."""
    whole = report.overall
    pairs = ((whole.ttft_ms, slo.ttft_s), (whole.tpot_ms, slo.tpot_s), (whole.jct_ms, slo.deadline_s))
    return max((times.p99 / 1e3 / bound for times, bound in pairs if times is not None and bound), default=0.0)


def shortlist(trials: Sequence[Tried], most: int) -> list[Tried]:
    """Return the best of ranked trials, at most two splits of a preset and group; the default preset's best always."""
    found: list[Tried] = []
    for trial in trials:
        own = trial.candidate
        same = [each for each, _ in found if (each.preset, each.cluster) == (own.preset, own.cluster)]
        if len(same) < 2 and len(found) < most:
            found.append(trial)
    default = next((each for each in trials if each.candidate.preset == DEFAULT_PRESET), None)
    return found if default is None or default in found else [*found, default]


def distinct(trials: Sequence[Tried]) -> list[Tried]:
    """Return the trials without those whose settings change nothing: their preset ignores them."""
    plain = [(candidate, report.overall) for candidate, report in trials if not candidate.settings]
    return [
        trial
        for trial in trials
        if not trial.candidate.settings or (trial.candidate.plain, trial.report.overall) not in plain
    ]


def as_good(judged: Sequence[Judged]) -> list[Judged]:
    """Return the best ones: without baselines that do not beat the default preset."""
    default = max((each for each in judged if each.candidate.preset == DEFAULT_PRESET), key=_merit, default=None)
    allowed = [each for each in judged if default is None or not _is_baseline(each) or each.beats(default)]
    met, goodput = _merit(max(allowed, key=_merit))
    return [
        each for each in allowed if each.mean >= met - _EQUAL_MET and each.goodput >= goodput * (1.0 - _EQUAL_GOODPUT)
    ]


def final(judged: Sequence[Judged], most: int = _FINALISTS) -> list[Judged]:
    """Return the ones whose capacity is searched: of those as good each preset's least busy, the default's first."""
    found: dict[str, Judged] = {}
    for each in sorted(as_good(judged), key=lambda each: (round(each.cost, 2), each.candidate.simplicity)):
        found.setdefault(each.candidate.preset, each)
    return sorted(found.values(), key=lambda each: each.candidate.preset != DEFAULT_PRESET)[:most]


def choose(judged: Sequence[Judged], capacities: Mapping[str, float]) -> Choice:
    """Choose among those as good: by capacity (label → rate; those without one fall out where others have one), then
    cost, then simplicity."""
    equals = as_good(judged)
    why_not = {each.candidate.label: _why_worse(each, equals) for each in judged if each not in equals}
    able = [each for each in equals if each.candidate.label in capacities] or equals
    why_not |= {each.candidate.label: "as good, others cost less" for each in equals}
    most = max((capacities.get(each.candidate.label, 0.0) for each in able), default=0.0)
    enough = [each for each in able if capacities.get(each.candidate.label, 0.0) >= (1.0 - _EQUAL) * most]
    why_not |= {each.candidate.label: "as good, but holds less" for each in able if each not in enough}
    least = min(each.cost for each in enough)
    cheap = [each for each in enough if each.cost <= (1.0 + _EQUAL) * least]
    why_not |= {each.candidate.label: "as good, but computes more" for each in enough if each not in cheap}
    best = min(cheap, key=lambda each: each.candidate.simplicity)
    why_not |= {each.candidate.label: "as good, but less simple" for each in cheap if each is not best}
    del why_not[best.candidate.label]
    others = len(equals) - 1
    as_well = f"{others} other{'s' if others > 1 else ''} as good here; it "
    if not others:
        why = "no other keeps as much"
    elif len(enough) == 1 and len(able) > 1:
        why = as_well + "has the highest capacity"
    elif len(cheap) == 1 and len(enough) > 1:
        why = as_well + "holds no less and computes least"
    else:
        why = as_well + "holds no less, costs no more and is simplest"
    return Choice(best, why, why_not)


def _why_worse(loser: Judged, equals: Sequence[Judged]) -> str:
    best = max(equals, key=_merit)
    if _merit(loser) >= _merit(best) and _is_baseline(loser):
        return "baseline, the default is as good"
    if loser.mean < best.mean - _EQUAL_MET:
        return f"keeps {100 * (best.mean - loser.mean):.1f} points less"
    if loser.goodput < best.goodput * (1.0 - _EQUAL_GOODPUT):
        return f"{100 * (1.0 - loser.goodput / best.goodput):.0f} % fewer tokens in time"
    return "baseline, the default is as good"


def _merit(judged: Judged) -> tuple[float, float]:
    return judged.mean, judged.goodput


def _is_baseline(judged: Judged) -> bool:
    return judged.candidate.preset.startswith(BASELINE)
