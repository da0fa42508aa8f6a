"""The result of a kill table or a soak: a document of one or more runs, its tables, and whether they passed.

Memory is judged where a life was long enough: it grows when the lower end of its slope's interval is above the limit.
The life's first part is left out: pools fill, caches and heaps find their size. What is left is cut into equal bins,
each its median, and the line is Theil's and Sen's: the median of the slopes between all pairs of bins. The 95 %
interval is Sen's, from the distribution of Kendall's statistic (Sen, JASA 63, 1968, §4).
Written once a minute while a soak runs (`finished` false), so that a long one can be looked at.
Called by `command` and `kill_table`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import sqrt
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from cohort.common.errors import ConfigError
from cohort.services.bench.chaos.accounts import Accounts, Fault, Unaccounted, Verdict, Waits
from cohort.services.bench.chaos.census import Life, Sample
from cohort.services.bench.output import markdown_table

MEGABYTE = 1e6
_BIN_S = 30.0
_LEAST_BINS = 8
_Z = 1.959964
BOUNDED = {"predictor/trainer_process": 300e6}
"""Bytes at most of processes that fill up by design, and are judged by that: the trainer keeps 20,000 finished
requests, with about 2 kB each, and what it learns from them once more."""
JUDGED_S = 600.0
"""A slope over less is told and not judged: pools and caches fill for some minutes."""
SHORT_S = 120.0
"""Lives below this are counted, not listed."""
UNDISTURBED, RESTARTED, DECK = "none", "all restarted", "by the deck"
_NUMBERS = ("requests", *Verdict, "resumed", "pause, s", "TTFT, s", "back, s", "pause beyond, s")
_ACTIONS = ("kill", "stop", "term", "restart")
_OF_FAULTS = (*_ACTIONS, "median pause, s", "pause, s", "TTFT, s", "back, s")
_OF_LIVES = ("min", "MB then", "MB now", "MB/hour", "95 %", "threads", "descriptors")
_MAX_LISTED = 5
"""Requests that are not accounted for, in words; the document has more."""


class Slope(msgspec.Struct, frozen=True):
    """Megabytes (1e6 bytes) an hour, with the ends of the 95 % interval; `over_s`: of how long a time."""

    mb_per_h: float
    low: float
    high: float
    over_s: float


class LifeReport(msgspec.Struct, frozen=True):
    """One life of one process. Megabytes are 1e6 bytes; the slopes leave out `skipped_s` at its begin. `rss_mb` every
    minute, and at the end."""

    name: str
    pid: int
    from_s: float
    to_s: float
    cpu_s: float
    skipped_s: float
    rss: Slope | None
    rss_mb: list[float]
    threads: tuple[int, int]
    descriptors: tuple[int, int]


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """The clients of one preset under one kind of fault, or under a soak's deck of all. `broken`: a kind of process,
    `UNDISTURBED`, `RESTARTED` or `DECK`. `findings`: empty when it passed. Only a soak has `by_kind` and what follows:
    kind, verdict, requests."""

    preset: str
    broken: str
    seconds: float
    requests: int
    verdicts: dict[str, int]
    resumed: int
    refusals: dict[str, int]
    waits: Waits
    faults: list[Fault]
    unaccounted: list[Unaccounted]
    findings: list[str]
    by_kind: dict[str, dict[str, int]] = {}
    cpu_s: float = 0.0
    lives: list[LifeReport] = []
    short_lives: dict[str, int] = {}
    counters: dict[str, float] = {}

    @staticmethod
    def of(preset: str, broken: str, seconds: float, accounts: Accounts, found: Sequence[str], **of_a_soak: Any) -> Run:
        """Return a run with the accounts and other findings."""
        findings = (
            [f"{accounts.unaccounted_total} requests are not accounted for"] if accounts.unaccounted_total else []
        )
        for bad in accounts.unaccounted[:_MAX_LISTED]:
            findings.append(f"{bad.kind} at {bad.from_s:.1f} s: {bad.detail[:300]}; under {bad.under}")
        return Run(
            preset=preset,
            broken=broken,
            seconds=seconds,
            requests=accounts.requests,
            verdicts={str(verdict): accounts.total(verdict) for verdict in Verdict},
            resumed=accounts.resumed,
            refusals=dict(accounts.refusals),
            waits=accounts.waits,
            faults=accounts.faults,
            unaccounted=accounts.unaccounted,
            findings=[*findings, *found],
            **of_a_soak,
        )

    @property
    def cells(self) -> list[str]:
        numbers = (self.requests, *(self.verdicts.get(verdict, 0) for verdict in Verdict), self.resumed)
        return [self.preset, self.broken, *(f"{number:,}" for number in numbers), *_waits(self.faults, self.waits)]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    schema_version: int = 2
    command: list[str]
    began: str
    model: str
    finished: bool
    runs: list[Run]

    @property
    def findings(self) -> list[str]:
        return [f"{run.preset}, {run.broken}: {finding}" for run in self.runs for finding in run.findings]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def read_document(path: Path) -> Document:
    """Read the result of a run. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Document)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: not a result of `cohort chaos`: {error}") from error


def lives(series: Mapping[Life, Sequence[Sample]], cpu_s: Mapping[Life, float], skip_s: float) -> list[LifeReport]:
    """Report every life that was long enough, in the order in which they began."""
    found = []
    for life, samples in series.items():
        if samples[-1].at_s - samples[0].at_s < SHORT_S:
            continue
        minutes = samples[:: max(1, round(60 / max(0.1, _interval_s(samples))))]
        ends = samples[0], samples[-1]
        found.append(
            LifeReport(
                life.name,
                life.pid,
                samples[0].at_s,
                samples[-1].at_s,
                cpu_s.get(life, 0.0),
                skip_s,
                slope(samples, skip_s),
                [round(sample.rss_bytes / MEGABYTE, 2) for sample in (*minutes, samples[-1])],
                (ends[0].threads, ends[1].threads),
                (sum(ends[0].descriptors.values()), sum(ends[1].descriptors.values())),
            )
        )
    return found


def slope(samples: Sequence[Sample], skip_s: float) -> Slope | None:
    """Return the slope of a life without its first `skip_s` seconds; None where too little is left."""
    if not samples:
        return None
    begin_s = samples[0].at_s + skip_s
    bins: dict[int, list[float]] = {}
    for sample in samples:
        if sample.at_s >= begin_s:
            bins.setdefault(int((sample.at_s - begin_s) // _BIN_S), []).append(sample.rss_bytes)
    points = [((number + 0.5) * _BIN_S, median(sizes)) for number, sizes in sorted(bins.items())]
    if len(points) < _LEAST_BINS:
        return None
    middle, low, high = theil_sen(points)
    scale = 3600 / MEGABYTE
    return Slope(middle * scale, low * scale, high * scale, points[-1][0] - points[0][0] + _BIN_S)


def theil_sen(points: Sequence[tuple[float, float]]) -> tuple[float, float, float]:
    """Return the slope of these (x, y) with different x, and the ends of its 95 % interval."""
    slopes = sorted((y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in combinations(points, 2))
    count, number = len(points), len(slopes)
    spread = _Z * sqrt(count * (count - 1) * (2 * count + 5) / 18)
    low = max(0, int((number - spread) / 2))
    high = min(number - 1, int((number + spread) / 2) + 1)
    return median(slopes), slopes[low], slopes[high]


def growing(found: Sequence[LifeReport], limit_mb_per_h: float) -> list[str]:
    """Name the lives that were long enough and grow for certain by more than the limit, or are beyond their bound."""
    findings = []
    for life in found:
        bound, most = BOUNDED.get(life.name), max(life.rss_mb)
        if bound is not None:
            if most > bound / MEGABYTE:
                findings.append(f"{life.name}: {most:.0f} MB of memory, its bound is {bound / MEGABYTE:.0f}")
        elif life.rss is not None and life.rss.over_s >= JUDGED_S and life.rss.low > limit_mb_per_h:
            ends = f"{life.rss.low:.1f} to {life.rss.high:.1f}"
            findings.append(f"{life.name}: memory grows by {life.rss.mb_per_h:.1f} MB an hour ({ends})")
    return findings


def short(series: Mapping[Life, Sequence[Sample]]) -> dict[str, int]:
    return dict(Counter(life.name for life, samples in series.items() if samples[-1].at_s - samples[0].at_s < SHORT_S))


def kinds(accounts: Accounts) -> dict[str, dict[str, int]]:
    return {kind: {str(verdict): count for verdict, count in each.items()} for kind, each in accounts.by_kind.items()}


def table(document: Document) -> str:
    """Render the runs, with how much longer than in the undisturbed one of the preset a pause was; where one of
    them had several faults the faults by process; of a soak requests by kind, and memory by life. Markdown."""
    calm = {run.preset: run.waits.pause_s for run in document.runs if run.broken == UNDISTURBED}
    rows = [
        [*run.cells, f"{run.waits.pause_s - calm[run.preset]:.2f}" if run.preset in calm else "–"]
        for run in document.runs
    ]
    parts = [markdown_table(["preset", "broken"], _NUMBERS, rows)]
    if any(len(run.faults) > 1 for run in document.runs):
        parts.append(markdown_table(["preset", "process"], _OF_FAULTS, list(_by_process(document.runs))))
    for run in document.runs:
        if run.by_kind:
            parts.append(markdown_table(["requests"], [*Verdict], list(_by_kind(run))))
            parts.append(markdown_table(["life"], _OF_LIVES, [_row(life) for life in run.lives]))
            parts.append(f"{run.requests} requests in {run.seconds / 60:.1f} min, {run.cpu_s:.0f} s of CPU\n")
    return "\n".join(parts)


def _by_process(runs: Sequence[Run]) -> Iterator[list[str]]:
    broken: dict[tuple[str, str], list[Fault]] = {}
    for run in runs:
        for fault in run.faults:
            broken.setdefault((run.preset, fault.process), []).append(fault)
    for (preset, process), faults in broken.items():
        counts = Counter(fault.action for fault in faults)
        pauses = [fault.waits.pause_s for fault in faults]
        longest = Waits(max(fault.waits.ttft_s for fault in faults), max(pauses))
        actions = (str(counts[action]) for action in _ACTIONS)
        yield [preset, process, *actions, f"{median(pauses):.2f}", *_waits(faults, longest)]


def _waits(faults: Sequence[Fault], longest: Waits) -> list[str]:
    back_s = [fault.back_s - fault.at_s for fault in faults if fault.back_s is not None]
    return [f"{longest.pause_s:.2f}", f"{longest.ttft_s:.2f}", f"{max(back_s):.1f}" if back_s else "–"]


def _by_kind(run: Run) -> Iterator[list[str]]:
    sums: dict[str, Counter[str]] = {}
    for kind, counts in run.by_kind.items():
        sums.setdefault(kind.partition(":")[0], Counter()).update(counts)
    for kind, each in sorted(sums.items()):
        yield [kind, *(str(each[verdict]) for verdict in Verdict)]


def _row(life: LifeReport) -> list[str]:
    found = life.rss
    return [
        life.name,
        f"{(life.to_s - life.from_s) / 60:.1f}",
        f"{life.rss_mb[0]:.1f}",
        f"{life.rss_mb[-1]:.1f}",
        "–" if found is None else f"{found.mb_per_h:+.2f}",
        "–" if found is None else f"{found.low:+.2f} to {found.high:+.2f}",
        f"{life.threads[0]} → {life.threads[1]}",
        f"{life.descriptors[0]} → {life.descriptors[1]}",
    ]


def _interval_s(samples: Sequence[Sample]) -> float:
    return (samples[-1].at_s - samples[0].at_s) / max(1, len(samples) - 1)
