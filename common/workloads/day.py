"""A synthetic day: load that rises and falls twice, first of long prompts with short answers, then the other way round.

Pure and seeded. For planners that change a pipeline's workers: no fixed arrangement suits all of it. Arrivals are a
Poisson process whose rate is, at share x of the day and with peaks at 0.3 and 0.72,

    rate(x) = peak · (night + (1 - night) · max(hump(x, 0.3), 0.9 · hump(x, 0.72)))
    hump(x, c) = exp(-((x - c) / 0.12)²)

and a request is one of the morning with a probability that falls from 0.95 to 0.05 around noon. Lengths are log-normal.
"""

from __future__ import annotations

import math

from cohort.common.types import Slo
from cohort.common.workloads.generate import Stream, stream
from cohort.common.workloads.items import NO_SLO, WorkItem, Workload, WorkloadFacts
from cohort.common.workloads.lengths import draw, fitted_lognormal

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
