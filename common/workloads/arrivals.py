"""When requests are due: open loop (Poisson, Gamma, all at once, a trace's own times) or closed loop.

Pure. Called by `generate` and by the benchmark's workload. Open loop: arrivals do not wait for answers, so a slow
server builds a queue, as real users would. Closed loop: a fixed number of users who each wait for their answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np

from cohort.common.errors import ConfigError


@dataclass(frozen=True, slots=True)
class RandomArrivals:
    """Gamma-distributed gaps with mean 1/rate; `cv`: their coefficient of variation (1 = Poisson, more = burstier)."""

    rate_per_s: float
    cv: float = 1.0


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` requests are in flight at all times; the next leaves when one ends."""

    concurrency: int


@dataclass(frozen=True, slots=True)
class AllAtOnce:
    """Offline batch: all requests are due at second 0."""


@dataclass(frozen=True, slots=True)
class TraceTimes:
    """The trace's own times, multiplied by `time_scale` (0.5 = twice as fast)."""

    time_scale: float = 1.0


Arrivals = RandomArrivals | ClosedLoop | AllAtOnce | TraceTimes


def due_times(
    arrivals: Arrivals, count: int, rng: np.random.Generator, trace_s: Sequence[float] | None
) -> list[float] | None:
    """Return the seconds from the start to each request; None for a closed loop.

    The same seed at another rate gives the same pattern, scaled: a sweep varies the rate and nothing else.
    """
    match arrivals:
        case RandomArrivals(rate_per_s, cv):
            gaps = rng.standard_exponential(count) if cv == 1.0 else _gamma_gaps(rng, cv, count)
            times = np.cumsum(gaps)
            # The first request is due at once: a lead-in of silence would only dilute the throughput.
            times -= times[0] if count else 0.0
            return [float(t) for t in times / rate_per_s]
        case ClosedLoop():
            return None
        case AllAtOnce():
            return [0.0] * count
        case TraceTimes(time_scale):
            if trace_s is None:
                raise ConfigError("the trace has no arrival times; give --rate, --concurrency or --all-at-once")
            return [t * time_scale for t in trace_s]
        case _:
            assert_never(arrivals)


def _gamma_gaps(rng: np.random.Generator, cv: float, count: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return gaps with mean 1 and the given coefficient of variation: shape 1/cv², scale cv²."""
    if cv == 0.0:
        return np.ones(count)
    return rng.gamma(1.0 / (cv * cv), cv * cv, count)


def enough_for(arrivals: RandomArrivals, duration_s: float) -> int:
    """Return a number of requests that lasts for the duration even when the gaps fall short of their mean."""
    expected = arrivals.rate_per_s * duration_s
    return int(expected + 6 * max(1.0, arrivals.cv) * expected**0.5) + 16


def describe(arrivals: Arrivals) -> str:
    match arrivals:
        case RandomArrivals(rate_per_s, cv):
            kind = "Poisson" if cv == 1.0 else f"Gamma (cv {cv:g})"
            return f"{kind}, {rate_per_s:g} requests/s"
        case ClosedLoop(concurrency):
            return f"closed loop, {concurrency} in flight"
        case AllAtOnce():
            return "all at once"
        case TraceTimes(time_scale):
            return "the trace's times" + ("" if time_scale == 1.0 else f" x {time_scale:g}")
        case _:
            assert_never(arrivals)
