"""Production load by ServeGen's tables: rates by window, clients with bursts of their own, lengths by quantile.

Pure and seeded but for the tables, which ship (`trace_files`). Called by the simulator and the benchmark, which replay
what comes out as any trace. The tables hold sums and quantiles of the clients of a model, no client by itself, so that
clients are made up here:

    clients      as many as are active in the median window; the first has the largest client's share of each window's
                 requests, the others share the rest alike
    gaps         Gamma, each client with a coefficient of variation of its own, evenly from the clients' median, 90th
                 percentile and maximum (medians of all windows; below the median they are as the median's)
    rates        the model's, piecewise constant: a client's gaps stretch and shrink with them. Windows without traffic,
                 gaps of the source, are left out
    lengths      prompt and output independently, by inverse quantiles: the source has no joint distribution
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cohort.common.workloads.generate import Stream, stream
from cohort.common.workloads.trace_files import table
from cohort.common.workloads.traces import Trace, TraceRow

_PREFIX = "servegen-"
MODELS = ("deepseek-r1", "m-large", "m-mid")
"""Models with lengths. Of m-small too few were published."""
NAMES = tuple(_PREFIX + model for model in MODELS)
SPAN_S, PEAK_PER_S = 3600.0, 3.0
"""Default duration and peak: those of the synthetic day."""

_Floats = NDArray[np.float64]


def servegen_trace(name: str, *, duration_s: float = SPAN_S, peak_per_s: float = PEAK_PER_S, seed: int = 0) -> Trace:
    """Draw the whole span of a model of `NAMES` (a day, or two weeks) compressed to `duration_s`; its busiest window
    has `peak_per_s` requests a second on average."""
    model = name.removeprefix(_PREFIX)
    windows = [row for row in table("servegen_windows") if row["model"] == model and float(row["rate_rps"]) > 0]

    def column(title: str) -> _Floats:
        return np.array([float(row[title]) for row in windows])

    rates = column("rate_rps") * (peak_per_s / column("rate_rps").max())
    largest = column("top_client_share")
    count = max(2, round(float(np.median(column("active_clients")))))
    variations = np.median([column(f"client_cv_{of}") for of in ("p50", "p90", "max")], axis=1)
    arrivals = stream(seed, Stream.ARRIVALS)
    times = []
    for client in range(count):
        share = largest if client == 0 else (1.0 - largest) / (count - 1)
        variation = float(np.interp((client + 0.5) / count, (0.5, 0.9, 1.0), variations))
        times.append(_renewals(rates * share, variation, duration_s, arrivals))
    due_s = np.sort(np.concatenate(times))
    due_s -= due_s[0]
    lengths = [
        _lengths(model, field, stream(seed, which).random(len(due_s)))
        for field, which in (("prompt_tokens", Stream.PROMPT_LENGTHS), ("output_tokens", Stream.OUTPUT_LENGTHS))
    ]
    rows = tuple(TraceRow(float(at), int(p), int(o)) for at, p, o in zip(due_s, *lengths, strict=True))
    return Trace("cohort", rows, 0)


def _renewals(rates: _Floats, variation: float, duration_s: float, random: np.random.Generator) -> _Floats:
    """Draw a client's arrivals: renewals of mean gap 1 on the scale of requests expected so far, mapped back to time.

    The first gap is a random part of one, as of a process that has been running.
    """
    edges = np.linspace(0.0, duration_s, len(rates) + 1)
    expected = np.concatenate([[0.0], np.cumsum(rates * duration_s / len(rates))])
    shape = 1.0 / (variation * variation)
    enough = int(expected[-1] + 6 * max(1.0, variation) * expected[-1] ** 0.5) + 16
    gaps = random.gamma(shape, 1.0 / shape, enough)
    gaps[0] = random.gamma(shape + 1.0, 1.0 / shape) * random.random()
    at = np.cumsum(gaps)
    found: _Floats = np.interp(at[at < expected[-1]], expected, edges)
    return found


def _lengths(model: str, field: str, at: _Floats) -> _Floats:
    quantiles = [row for row in table("servegen_length_quantiles") if (row["model"], row["field"]) == (model, field)]
    levels, values = ([float(row[title]) for row in quantiles] for title in ("q", "value"))
    found: _Floats = np.maximum(1.0, np.rint(np.interp(at, levels, values)))
    return found
