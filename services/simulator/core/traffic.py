"""`--trace` and its companions → a `Workload`: a trace by file or name, a shape of a paper, or fixed lengths."""

from __future__ import annotations

import math
import re
from copy import copy
from dataclasses import replace
from pathlib import Path

from cohort.common.errors import ConfigError
from cohort.common.types import Slo
from cohort.common.workloads.arrivals import AllAtOnce, Arrivals, ClosedLoop, RandomArrivals, TraceTimes
from cohort.common.workloads.changes import with_class_share, with_slos
from cohort.common.workloads.generate import Drawn, FromTrace, Source, Stream, generate, stream
from cohort.common.workloads.items import NO_SLO, WorkItem, Workload, WorkloadFacts
from cohort.common.workloads.lengths import Fixed, draw, fitted_lognormal
from cohort.common.workloads.papers import SHAPES, paper_workload
from cohort.common.workloads.servegen import NAMES as SERVEGEN
from cohort.common.workloads.servegen import PEAK_PER_S, SPAN_S, servegen_trace
from cohort.common.workloads.trace_files import names, trace_file
from cohort.common.workloads.traces import Trace, read_trace

_FIXED = re.compile(r"(\d+)x(\d+)$")
DAY = "day"
"""Name of a synthetic day in `--duration` seconds, whose peak is `--rate`."""
_ENOUGH = 1000
"""Number of requests when neither a number nor a duration is given and the source has no end."""
_SAMPLE = 200
_GOLDEN = 0.5 * (5.0**0.5 - 1.0)
"""Multiples of it spread evenly over a trace, modulo 1, however many there are."""


class Traffic:
    """A source of requests that is read once and can be replayed at several rates."""

    def __init__(
        self,
        text: str,
        *,
        count: int | None,
        duration_s: float | None,
        time_scale: float,
        cv: float,
        seed: int,
        slo: Slo,
        best_effort: float,
        sort: bool = False,
    ) -> None:
        self._text, self._count, self._duration_s = text, count, duration_s
        self._time_scale, self._cv, self._seed = time_scale, cv, seed
        self._slo, self._best_effort = slo, best_effort
        self._trace: Trace | None = None
        self._source: Source | None = None
        self._parted = False
        fixed = _FIXED.match(text)
        if (path := trace_file(text)) is not None:
            self._trace = read_trace(path, sort=sort)
        elif fixed:
            prompt, output = int(fixed[1]), int(fixed[2])
            if not prompt or not output:
                raise ConfigError(f"--trace {text}: prompt and output need at least one token")
            self._source = Drawn(Fixed(prompt), Fixed(output))
        elif text not in (DAY, *SERVEGEN, *SHAPES):
            known = ", ".join((DAY, *names(), *SERVEGEN, *SHAPES))
            raise ConfigError(f"--trace {text}: neither a file nor PROMPTxOUTPUT nor one of {known}")

    def lasting(self, duration_s: float, *, seed: int | None = None, most: int | None = None) -> Traffic:
        """Return the same traffic for this long, of another seed, of `most` requests. At a rate a trace is drawn from;
        of one with its own times the seed decides which part of it."""
        other = copy(self)
        other._count, other._duration_s = most, duration_s
        other._seed = self._seed if seed is None else seed
        other._parted = True
        return other

    def sample(self) -> list[WorkItem]:
        """Return requests of usual lengths."""
        other = copy(self)
        other._count, other._duration_s = min(self._count or _SAMPLE, _SAMPLE), None
        return list(other.workload(1.0).items)

    def workload(self, rate_per_s: float | None = None, concurrency: int | None = None) -> Workload:
        """Generate at this rate (Poisson unless `cv`), at this concurrency, or with the source's own times. Without any
        of them all requests come at once."""
        arrivals: Arrivals | None = None
        if rate_per_s is not None:
            if rate_per_s <= 0:
                raise ConfigError(f"--rate {rate_per_s:g}: must be above 0")
            arrivals = RandomArrivals(rate_per_s, self._cv)
        elif concurrency is not None:
            arrivals = ClosedLoop(concurrency)
        span_s, peak_per_s = self._duration_s or SPAN_S, rate_per_s or PEAK_PER_S
        if self._text == DAY:
            workload = synthetic_day(span_s, peak_per_s, seed=self._seed)
        elif self._text in SERVEGEN:
            trace = servegen_trace(self._text, duration_s=span_s, peak_per_s=peak_per_s, seed=self._seed)
            own = arrivals if concurrency is not None and arrivals is not None else TraceTimes(self._time_scale)
            workload = generate(self._text, FromTrace(trace, self._text), own, count=self._count, seed=self._seed)
        else:
            workload = self._generate(arrivals)
        if self._slo != Slo():
            workload = with_slos(workload, lambda item: self._slo)
        if self._best_effort:
            workload = with_class_share(workload, self._best_effort, seed=self._seed)
        return workload

    def _generate(self, arrivals: Arrivals | None) -> Workload:
        count, duration_s = self._count, self._duration_s
        if self._trace is not None:
            name = Path(self._text).name
            if arrivals is None:
                timed = self._trace.arrival_s is not None
                arrivals = TraceTimes(self._time_scale) if timed else AllAtOnce()
            # A trace is repeated by drawing from it only where it must last for a time.
            resample = isinstance(arrivals, RandomArrivals) and (
                duration_s is not None or (count or 0) > len(self._trace.rows)
            )
            source = FromTrace(self._trace, name, resample=resample)
            if self._parted and duration_s is not None and isinstance(arrivals, TraceTimes):
                return _part(generate(name, source, arrivals, seed=self._seed), duration_s, count, self._seed)
            return generate(name, source, arrivals, count=count, duration_s=duration_s, seed=self._seed)
        arrivals = arrivals or (None if self._text in SHAPES and SHAPES[self._text].rate_per_s else AllAtOnce())
        if count is None and (duration_s is None or isinstance(arrivals, AllAtOnce | ClosedLoop)):
            count = _ENOUGH
        if self._source is None:
            return paper_workload(self._text, arrivals, count=count, duration_s=duration_s, seed=self._seed)
        return generate(
            self._text, self._source, arrivals or AllAtOnce(), count=count, duration_s=duration_s, seed=self._seed
        )

    @property
    def own_rate_per_s(self) -> float | None:
        """Rate of the source's own times; None when it has none."""
        if self._text == DAY:
            return None
        if self._trace is None:
            return SHAPES[self._text].rate_per_s if self._text in SHAPES else None
        return self.workload().rate_per_s if self._trace.arrival_s is not None else None


def _part(whole: Workload, duration_s: float, most: int | None, seed: int) -> Workload:
    """Cut out a part of this length, another one for each seed; all of a workload that is no longer."""
    start_s = max(0.0, whole.span_s - duration_s) * (_GOLDEN * seed % 1.0)
    items = [item for item in whole.items if start_s <= item.arrival_s < start_s + duration_s][:most]
    return replace(whole, items=tuple(replace(item, arrival_s=item.arrival_s - start_s) for item in items))


def parse_slo(text: str) -> Slo:
    """Parse `ttft=0.4,tpot=0.1,deadline=30` in seconds; "" = no SLO. Raises `ConfigError`."""
    values: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        name, _, number = part.partition("=")
        try:
            values[name.strip()] = float(number)
        except ValueError:
            raise ConfigError(f"--slo {text}: {number!r} is not a number of seconds") from None
    unknown = set(values) - {"ttft", "tpot", "deadline"}
    if unknown or any(value < 0 for value in values.values()):
        raise ConfigError(f"--slo {text}: wants ttft=, tpot= and deadline= in seconds, separated by commas")
    return Slo(values.get("ttft", 0.0), values.get("tpot", 0.0), values.get("deadline", 0.0))


# -- a synthetic day ---------------------------------------------------------------------------------------------------

NIGHT = 0.06
_PEAKS = ((0.30, 1.0), (0.72, 0.9))
_WIDTH = 0.12
_MORNING = (fitted_lognormal(1600.0, 700.0, 64, 6000), fitted_lognormal(60.0, 40.0, 4, 300))
_EVENING = (fitted_lognormal(180.0, 150.0, 8, 1500), fitted_lognormal(420.0, 200.0, 16, 1200))


def rate_at(share: float, peak_per_s: float) -> float:
    """Return the requests a second at this share of the day."""
    hump = max(height * math.exp(-(((share - centre) / _WIDTH) ** 2)) for centre, height in _PEAKS)
    return peak_per_s * (NIGHT + (1.0 - NIGHT) * hump)


def morning_share(share: float) -> float:
    return 0.05 + 0.9 / (1.0 + math.exp((share - 0.51) / 0.03))


def synthetic_day(duration_s: float, peak_per_s: float, *, seed: int = 0, slo: Slo = NO_SLO) -> Workload:
    """Draw load that rises and falls twice, first of long prompts with short answers, then the other way round.

    For planners that change a pipeline's workers: no fixed arrangement suits all of it. Arrivals are a Poisson process
    whose rate is, at share x of the day and with peaks at 0.3 and 0.72,

        rate(x) = peak · (night + (1 - night) · max(hump(x, 0.3), 0.9 · hump(x, 0.72)))
        hump(x, c) = exp(-((x - c) / 0.12)²)

    and a request is one of the morning with a probability that falls from 0.95 to 0.05 around noon. Lengths are
    log-normal.
    """
    arrivals, kinds = stream(seed, Stream.ARRIVALS), stream(seed, Stream.MIXTURE)
    times: list[float] = []
    at_s = 0.0
    while True:  # thinned: candidates at the peak's rate, kept with the rate's share of it
        at_s += float(arrivals.exponential(1.0 / peak_per_s))
        if at_s >= duration_s:
            break
        if arrivals.random() * peak_per_s < rate_at(at_s / duration_s, peak_per_s):
            times.append(at_s)
    prompts, outputs = stream(seed, Stream.PROMPT_LENGTHS), stream(seed, Stream.OUTPUT_LENGTHS)
    lengths = [
        (draw(prompt, prompts, len(times)), draw(output, outputs, len(times)))
        for prompt, output in (_MORNING, _EVENING)
    ]
    items = []
    for index, time_s in enumerate(times):
        prompt, output = lengths[0 if kinds.random() < morning_share(time_s / duration_s) else 1]
        items.append(WorkItem(time_s, int(prompt[index]), int(output[index]), slo=slo))
    note = f"two peaks of {peak_per_s:g} requests/s, prompts of 1600 then 180 tokens, answers of 60 then 420 on average"
    return Workload("day", tuple(items), WorkloadFacts("synthetic day", "Poisson, by the hour", seed, notes=(note,)))
