"""The last minute: what all processes' counters grew by in it, as the figures that live page and terminal show.

Pure; `aggregate.py` owns a `Growth` for each process and calls `figures`. Latencies are quantiles of the histograms in
`/metrics`, over the same buckets, so that Prometheus' `histogram_quantile(…[1m])` says the same.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, get_args

import msgspec

from cohort.common.process.metrics import LATENCY_BUCKETS_S, quantile
from cohort.common.types import TrafficClass

WINDOW_S = 60.0
_KEPT_EVERY_S = 1.0
RATED = (
    "requests_total",
    "finished_total",
    "failed_total",
    "prompt_tokens_total",
    "generation_tokens_total",
    "predictions_total",
    "dispatched_total",
    "prefill_tokens_total",
    "decode_tokens_total",
    "preemptions_total",
)
"""Stats whose rates are figures."""

Counts = Mapping[str, Sequence[float]]


class Latency(msgspec.Struct, frozen=True):
    """Quantiles in seconds; None where nothing was observed."""

    p50_s: float | None
    p99_s: float | None


class ClassFigures(msgspec.Struct, frozen=True):
    """`tpot`: of requests that ended; `itl`: of each two tokens. `slo`: requests that met and missed, by objective."""

    ttft: Latency
    tpot: Latency
    itl: Latency
    slo: dict[str, tuple[int, int]]


class Figures(msgspec.Struct, frozen=True):
    """Figures of the last `seconds`. `refused`: requests by reason."""

    seconds: float
    arrivals_per_s: float
    finished_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    failed: int
    refused: dict[str, int]
    classes: dict[str, ClassFigures]


class WorkerFigures(msgspec.Struct, frozen=True):
    """A worker's iterations in the window: mean length and rows; 0 where none ran."""

    step_ms: float
    rows: float


class _Kept(NamedTuple):
    at_s: float
    counts: dict[str, list[float]]


class Growth:
    """Growing counters of one process, across restarts, with what they were during the window."""

    def __init__(self) -> None:
        self._incarnation = -1
        self._before: dict[str, list[float]] = {}
        """Sums of the incarnations before this one, less what came before the first heartbeat."""
        self._now: dict[str, list[float]] = {}
        self._kept: deque[_Kept] = deque()

    def note(self, now_s: float, incarnation: int, stats: Mapping[str, float], counts: Counts) -> None:
        """Record a heartbeat."""
        found = {name: [stats[name]] for name in RATED if name in stats} | {n: list(each) for n, each in counts.items()}
        if incarnation != self._incarnation:
            first = self._incarnation == -1
            self._incarnation = incarnation
            self._before = {n: [-value for value in each] for n, each in found.items()} if first else self._now
        self._now = self._now | {n: _plus(self._before.get(n, ()), each) for n, each in found.items()}
        if not self._kept or now_s - self._kept[-1].at_s >= _KEPT_EVERY_S - 1e-6:
            self._kept.append(_Kept(now_s, self._now))

    def since(self, now_s: float) -> dict[str, list[float]]:
        """Return the increases of the window that ends now."""
        while len(self._kept) > 1 and self._kept[1].at_s <= now_s - WINDOW_S:
            self._kept.popleft()
        if not self._kept:
            return {}
        base = self._kept[0].counts
        return {name: _plus(each, [-value for value in base.get(name, ())]) for name, each in self._now.items()}


def _plus(one: Sequence[float], other: Sequence[float]) -> list[float]:
    short, long = sorted((one, other), key=len)
    return [value + (short[n] if n < len(short) else 0.0) for n, value in enumerate(long)]


def summed(parts: Iterable[Counts]) -> dict[str, list[float]]:
    """Return the increases of several processes together."""
    sums: dict[str, list[float]] = {}
    for part in parts:
        for name, each in part.items():
            sums[name] = _plus(sums.get(name, ()), each)
    return sums


def figures(grown: Counts, seconds: float) -> Figures:
    """Return the figures of the gateways' increases."""
    rates = rates_of(grown, seconds)
    refused: defaultdict[str, int] = defaultdict(int)
    for name, each in grown.items():
        if name.startswith("refused ") and each[0]:
            refused[name.removeprefix("refused ")] += round(each[0])
    return Figures(
        seconds=round(seconds, 1),
        arrivals_per_s=rates.get("requests_total", 0.0),
        finished_per_s=rates.get("finished_total", 0.0),
        prompt_tokens_per_s=rates.get("prompt_tokens_total", 0.0),
        output_tokens_per_s=rates.get("generation_tokens_total", 0.0),
        failed=round(grown.get("failed_total", [0.0])[0]),
        refused=dict(sorted(refused.items())),
        classes={name: _of_class(grown, name) for name in get_args(TrafficClass)},
    )


def rates_of(grown: Counts, seconds: float) -> dict[str, float]:
    """Return the rates of `RATED` a second, as far as they are known."""
    return {name: round(grown[name][0] / max(seconds, 1.0), 3) for name in RATED if name in grown}


def worker_figures(grown: Counts) -> WorkerFigures | None:
    """Return a worker's iterations; None of another process."""
    if "steps" not in grown:
        return None
    steps, seconds, rows = grown["steps"]
    return WorkerFigures(round(1000 * seconds / max(1.0, steps), 3), round(rows / max(1.0, steps), 2))


def _of_class(grown: Counts, name: str) -> ClassFigures:
    slo = {key.split()[2]: each for key, each in grown.items() if key.startswith(f"slo {name} ") and any(each)}
    return ClassFigures(
        ttft=_latency(grown.get(f"ttft {name}", ())),
        tpot=_latency(grown.get(f"tpot {name}", ())),
        itl=_latency(grown.get(f"itl {name}", ())),
        slo={objective: (round(met), round(missed)) for objective, (met, missed) in slo.items()},
    )


def _latency(counts: Sequence[float]) -> Latency:
    bounds = (*LATENCY_BUCKETS_S, math.inf)
    p50_s, p99_s = (quantile(dict(zip(bounds, counts, strict=False)), share) for share in (0.5, 0.99))
    return Latency(p50_s, p99_s)
