"""The result of a soak: a document, its table, and whether it passed.

Memory is judged where a life was long enough: it grows when the lower end of its slope's interval is above the limit.
Written once a minute while a soak runs (`finished` false), so that a long one can be looked at. Called by `command`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from cohort.common.errors import ConfigError
from cohort.services.bench.chaos.accounts import Accounts, Fault, Unaccounted, Verdict
from cohort.services.bench.chaos.census import Life, Sample
from cohort.services.bench.chaos.slopes import MEGABYTE, Slope, slope
from cohort.services.bench.output import markdown_table

BOUNDED = {"predictor/trainer_process": 300e6}
"""Bytes at most of processes that fill up by design, and are judged by that: the trainer keeps 20,000 finished
requests, with about 2 kB each, and what it learns from them once more."""
JUDGED_S = 600.0
"""A slope over less is told and not judged: pools and caches fill for some minutes."""
SHORT_S = 120.0
"""Lives below this are counted, not listed."""


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
    anonymous: Slope | None
    rss_mb: list[float]
    threads: tuple[int, int]
    descriptors: tuple[int, int]


class Document(msgspec.Struct, frozen=True, kw_only=True):
    """The file behind `--json`. `by_kind`: kind, verdict, requests. `findings`: empty when it passed."""

    schema_version: int = 1
    mode: str = "soak"
    command: list[str]
    began: str
    seconds: float
    finished: bool
    preset: str
    model: str
    cpu_s: float
    requests: int
    verdicts: dict[str, int]
    by_kind: dict[str, dict[str, int]]
    refusals: dict[str, int]
    faults: list[Fault]
    lives: list[LifeReport]
    short_lives: dict[str, int]
    slope_limit_mb_per_h: float
    counters: dict[str, float]
    unaccounted: list[Unaccounted]
    findings: list[str]

    def encode(self) -> bytes:
        return msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n"


def read_document(path: Path) -> Document:
    """The result of a soak. Raises `ConfigError`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Document)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path}: not the result of a soak: {error}") from error


def lives(series: Mapping[Life, Sequence[Sample]], cpu_s: Mapping[Life, float], skip_s: float) -> list[LifeReport]:
    """Of every life that was long enough, in the order in which they began."""
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
                slope(samples, skip_s, anonymous=True),
                [round(sample.rss_bytes / MEGABYTE, 2) for sample in (*minutes, samples[-1])],
                (ends[0].threads, ends[1].threads),
                (sum(ends[0].descriptors.values()), sum(ends[1].descriptors.values())),
            )
        )
    return found


def growing(found: Sequence[LifeReport], limit_mb_per_h: float) -> list[str]:
    """The lives that were long enough and grow for certain by more than the limit, or are beyond their bound."""
    said = []
    for life in found:
        bound, most = BOUNDED.get(life.name), max(life.rss_mb)
        if bound is not None:
            if most > bound / MEGABYTE:
                said.append(f"{life.name}: {most:.0f} MB of memory, its bound is {bound / MEGABYTE:.0f}")
        elif life.rss is not None and life.rss.over_s >= JUDGED_S and life.rss.low > limit_mb_per_h:
            ends = f"{life.rss.low:.1f} to {life.rss.high:.1f}"
            said.append(f"{life.name}: memory grows by {life.rss.mb_per_h:.1f} MB an hour ({ends})")
    return said


def short(series: Mapping[Life, Sequence[Sample]]) -> dict[str, int]:
    return dict(Counter(life.name for life, samples in series.items() if samples[-1].at_s - samples[0].at_s < SHORT_S))


def kinds(accounts: Accounts) -> dict[str, dict[str, int]]:
    return {kind: {str(verdict): count for verdict, count in each.items()} for kind, each in accounts.by_kind.items()}


def table(document: Document) -> str:
    """Requests by kind and verdict, faults by process, memory by life, findings. Markdown."""
    verdicts = [str(verdict) for verdict in Verdict]
    sums: dict[str, Counter[str]] = {}
    for kind, counts in document.by_kind.items():
        sums.setdefault(kind.partition(":")[0], Counter()).update(counts)
    rows = [[kind, *(str(each[name]) for name in verdicts)] for kind, each in sorted(sums.items())]
    rows.append(["all", *(str(document.verdicts.get(name, 0)) for name in verdicts)])
    broken: dict[str, Counter[str]] = {}
    for fault in document.faults:
        broken.setdefault(fault.process, Counter())[fault.action] += 1
    actions = ["kill", "stop", "term"]
    parts = [
        f"{document.requests} requests in {document.seconds / 60:.1f} min, {document.cpu_s:.0f} s of CPU\n",
        markdown_table(["requests"], verdicts, rows),
        markdown_table(["faults"], actions, [[name, *(str(each[a]) for a in actions)] for name, each in broken.items()])
        if broken
        else "no faults\n",
        markdown_table(
            ["life"],
            ["min", "MB then", "MB now", "MB/hour", "95 %", "threads", "descriptors"],
            [_row(life) for life in document.lives],
        ),
        "\n".join(["findings:", *(f"- {finding}" for finding in document.findings)])
        if document.findings
        else "nothing was found",
    ]
    return "\n".join(parts) + "\n"


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
