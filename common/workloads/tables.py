"""Reads tables that describe traffic without listing requests: length quantiles (ServeGen) and rates over time.

Called by the simulator. Gives distributions and arrivals for `generate`; names file, line and field of what is wrong.
"""

from __future__ import annotations

import math
from pathlib import Path

from cohort.common.errors import ConfigError
from cohort.common.workloads.arrivals import VaryingRate
from cohort.common.workloads.files import csv_records
from cohort.common.workloads.generate import Drawn
from cohort.common.workloads.lengths import Quantiles

SERVEGEN_WINDOW_S = 600.0
HOUR_S = 3600.0
DAY_S = 86400.0


def read_length_quantiles(path: Path, model: str) -> Drawn:
    """Prompt and output lengths of one model from a table `model,field,q,value`, q evenly spaced from 0 to 1.

    Marginals only: prompt and output are drawn independently, as the source has them.
    """
    points: dict[str, list[int]] = {"prompt_tokens": [], "output_tokens": []}
    places: dict[str, list[float]] = {field: [] for field in points}
    models: set[str] = set()
    for line, row in csv_records(path, frozenset({"model", "field", "q", "value"})):
        models.add(row["model"])
        field = row["field"]
        if row["model"] != model or field not in points:
            continue
        where = f"{path}:{line}"
        q, value = _number(where, "q", row["q"]), _number(where, "value", row["value"])
        values = points[field]
        if not values and q != 0.0:
            raise ConfigError(f"{where}: column 'q': the first quantile of {field} is {q:g}, must be 0")
        if values and q <= places[field][-1]:
            raise ConfigError(f"{where}: column 'q': {q:g} does not come after {places[field][-1]:g}")
        if value < 1 or (values and value < values[-1]):
            raise ConfigError(f"{where}: column 'value': {value:g} is below 1 or below the quantile before it")
        places[field].append(q)
        values.append(round(value))
    for field, values in points.items():
        if not values:
            raise ConfigError(f"{path}: no {field} of model {model!r}; there are: {', '.join(sorted(models))}")
        last = max(1, len(values) - 1)
        if len(values) < 2 or any(abs(q - at / last) > 0.01 / last for at, q in enumerate(places[field])):
            raise ConfigError(f"{path}: quantiles of {model} {field} must run evenly from 0 to 1")
    prompt, output = (Quantiles(f"{model} {field}", tuple(values)) for field, values in points.items())
    return Drawn(prompt, output)


def read_rate_windows(path: Path, model: str, *, scale: float = 1.0) -> VaryingRate:
    """Rates of one model from ServeGen's windows of 600 s, gaps of the median client's cv.

    Windows without traffic are gaps of the source and left out. Differs from the source: there every client is a
    renewal process of its own; here their sum is one, with the median of the windows' median cv.
    """
    rates: list[float] = []
    cvs: list[float] = []
    models: set[str] = set()
    for line, row in csv_records(path, frozenset({"model", "window_start_s", "rate_rps", "client_cv_p50"})):
        models.add(row["model"])
        if row["model"] != model:
            continue
        rate = _number(f"{path}:{line}", "rate_rps", row["rate_rps"])
        if rate < 0:
            raise ConfigError(f"{path}:{line}: column 'rate_rps': {rate:g} must not be negative")
        if rate > 0:
            rates.append(rate)
            if row["client_cv_p50"].strip():
                cvs.append(_number(f"{path}:{line}", "client_cv_p50", row["client_cv_p50"]))
    if not rates:
        raise ConfigError(f"{path}: no traffic of model {model!r}; there are: {', '.join(sorted(models))}")
    cv = sorted(cvs)[len(cvs) // 2] if cvs else 1.0
    return VaryingRate(SERVEGEN_WINDOW_S, tuple(rates), cv, scale)


def read_rate_profile(path: Path, kind: str = "hour_of_day_mean", *, scale: float = 1.0) -> VaryingRate:
    """BurstGPT's requests per hour of the day (`hour_of_day_mean`) or per day (`day`) as a rate that changes."""
    windows = {"hour_of_day_mean": HOUR_S, "day": DAY_S}
    if kind not in windows:
        raise ConfigError(f"no rate profile {kind!r}; there are: {', '.join(windows)}")
    counts: list[float] = []
    for line, row in csv_records(path, frozenset({"kind", "index", "requests"})):
        if row["kind"] != kind:
            continue
        where = f"{path}:{line}"
        if _number(where, "index", row["index"]) != len(counts):
            raise ConfigError(f"{where}: column 'index': {row['index']} is not {len(counts)}, the next of {kind}")
        requests = _number(where, "requests", row["requests"])
        if requests < 0:
            raise ConfigError(f"{where}: column 'requests': {requests:g} must not be negative")
        counts.append(requests)
    if not any(counts):
        raise ConfigError(f"{path}: no rows of kind {kind!r} with requests")
    return VaryingRate(windows[kind], tuple(count / windows[kind] for count in counts), scale=scale)


def _number(where: str, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise ConfigError(f"{where}: column {column!r}: {text!r} is not a number") from None
    if not math.isfinite(value):
        raise ConfigError(f"{where}: column {column!r}: {text!r} is not a finite number")
    return value
