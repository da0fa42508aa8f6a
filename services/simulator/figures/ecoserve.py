"""EcoServe §2 and §4: OPT-13B, Llama-33B and OPT-175B on A100-80GB, against ORCA, vLLM, FastGen and MultiRes.

Models, data sets, systems and choices that the paper leaves open: `ecoserve_setup`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import fmean
from typing import Any

from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.figures.ecoserve_setup import (
    BUFFER,
    CALM,
    ECOSERVE,
    FASTGEN,
    FORECAST,
    LLAMA,
    MULTIRES,
    NAMES,
    OPT13,
    OPT175,
    ORCA,
    PADDING,
    PARTS,
    RESERVE,
    SHORT,
    VLLM,
    Case,
    Model,
    attainment,
    loaded,
    mean_ms,
    printed,
    sustained,
)
from cohort.services.simulator.figures.figure import Figure, Kind, Lab, Paper, Standing

_row = Paper("ecoserve", "EcoServe").row
_ALL = "all three, mean, OPT-13B"


def _metric(report: SimReport, metric: str) -> float:
    overall = report.overall
    match metric:
        case "throughput":
            return overall.requests_per_s
        case "output tokens/s":
            return overall.output_tokens_per_s
        case "JCT":
            return mean_ms(overall.jct_ms)
        case _:
            return mean_ms(overall.tbt_ms)


_OF_PARTS: dict[str, dict[str, tuple[float, float]]] = {
    # Fig. 11's text, over models and data sets: metric, part, the end nearer to no effect and the other
    "throughput": {"D": (1.75, 1.84), "SD": (1.91, 2.13), "SDO": (2.15, 2.32), "full": (2.67, 2.96)},
    "JCT": {"D": (0.84, 0.64), "SD": (0.65, 0.42), "SDO": (0.57, 0.36), "full": (0.36, 0.09)},
    "TBT": {"D": (0.86, 0.68), "SD": (0.70, 0.48), "SDO": (0.59, 0.38), "full": (0.40, 0.28)},
}
_TOKENS = "output tokens/s"
_PARTS = ("D", "SD", "SDO", "full", "forecast")


def _part(part: str, metric: str, *, saturated: bool = False) -> Figure:
    """Compare one variant with vLLM, mean of the data sets, at the rates of Table 2 or where EcoServe saturates."""
    report = loaded if saturated else printed

    def measure(lab: Lab) -> float:
        pairs = [(report(lab, ECOSERVE, data, PARTS[part]), report(lab, VLLM, data)) for data in NAMES]
        return sum(_metric(ours, metric) / _metric(theirs, metric) for ours, theirs in pairs) / len(pairs)

    name = {"full": "EcoServe", "forecast": "EcoServe by forecast"}.get(part, f"EcoServe-{part}")
    of = "tokens" if metric == _TOKENS else metric.lower()
    paper, to = _OF_PARTS.get(metric, {}).get("full" if part == "forecast" else part, (math.nan, None))
    notes = (
        "where EcoServe saturates; no request overtakes one that is overdue by 30 s" if saturated else "",
        "paper: of EcoServe" if part == "forecast" else "",
        "the paper prints none" if math.isnan(paper) else "",
    )
    standing = Standing.READING if part == "forecast" or saturated else Standing.CLAIM
    standing = Standing.UNCOMPARED if math.isnan(paper) else standing
    id_, note = f"11-{of}-{part.lower()}{'' if saturated else '-printed'}", "; ".join(text for text in notes if text)
    row = _row(id_, _ALL, f"{name} against vLLM", metric, "x", paper, measure, note, standing, paper_to=to)
    if part != "full":
        return row
    return replace(row, exercised=lambda lab: fmean(_borrowed(report(lab, ECOSERVE, data)) for data in NAMES))


def _borrowed(report: SimReport) -> float:
    """Return the percentage of ended requests that borrowed KV (E7)."""
    borrowers = sum(instance.scheduler["borrowers_total"] for instance in report.instances)
    return 100.0 * borrowers / max(1, report.overall.finished)


def _failed(report: SimReport, preset: str) -> float:
    """Count failures to get more KV while running (EcoServe: E5's stops and E8's late borrowers), per request."""
    failed = float(sum(instance.allocation_failures for instance in report.instances))
    if preset == ECOSERVE:
        named = ("underpredictions_stopped_total", "borrowers_late_total")
        failed = sum(instance.scheduler[name] for instance in report.instances for name in named)
    return min(1.0, failed / max(1, report.overall.finished))


def _spared(lab: Lab, preset: str, eco: dict[str, Any] | None = None, **other: Any) -> float:
    """Return the percentage of requests served without such a failure."""
    reports = [printed(lab, preset, data, eco, **other) for data in NAMES]
    return 100.0 * (1.0 - sum(_failed(report, preset) for report in reports) / len(reports))


_SPARED = "requests without allocation failure"


def _spared_figure(id_: str, system: str, preset: str, paper: float, eco: dict[str, Any], *, oracle: bool) -> Figure:
    return _row(
        f"1d-failures{id_}",
        _ALL,
        system,
        _SPARED,
        "%",
        paper,
        lambda lab: _spared(lab, preset, eco, oracle=oracle),
        "true lengths, as in the paper's §2" if oracle else "predicted lengths" if preset == ECOSERVE else "",
        Standing.READING if preset == ECOSERVE and not oracle else Standing.CLAIM if oracle else Standing.ANCHOR,
    )


def _spared_with_headroom(preset: str, paper: float) -> Figure:
    found = _spared_figure(f"-{SHORT[preset]}-headroom", preset, preset, paper, {}, oracle=False)
    note = "newcomers leave headroom"
    return replace(found, measure=lambda lab: _spared(lab, preset, headroom=True), note=note, standing=Standing.READING)


def _anchor(preset: str, paper: float, note: str, standing: Standing) -> Figure:
    def measure(lab: Lab) -> float:
        return sum(mean_ms(printed(lab, preset, data).overall.tbt_ms) for data in NAMES) / len(NAMES)

    return _row(f"11-anchor-{SHORT[preset]}", _ALL, preset, "time between tokens", "ms", paper, measure, note, standing)


def _spared_of(preset: str, data: str) -> Figure:
    def measure(lab: Lab) -> float:
        return 100.0 * (1.0 - _failed(printed(lab, preset, data), preset))

    id_, note = f"1d-failures-{SHORT[preset]}-{data}", "the paper prints their mean"
    workload = f"{NAMES[data]}, OPT-13B"
    return _row(id_, workload, preset, _SPARED, "%", math.nan, measure, note, Standing.UNCOMPARED)


def _throughput_ratio(id_: str, over: tuple[str, str], under: tuple[str, str], paper: float, note: str = "") -> Figure:
    """Compare two systems with known lengths (§2), each a preset and a part of `PARTS`, mean of the data sets."""

    def served(lab: Lab, data: str, system: tuple[str, str]) -> float:
        return printed(lab, system[0], data, PARTS[system[1]], oracle=True).overall.requests_per_s

    def measure(lab: Lab) -> float:
        return sum(served(lab, data, over) / served(lab, data, under) for data in NAMES) / len(NAMES)

    def shown(system: tuple[str, str]) -> str:
        preset, part = system
        names = {"SD": "SyncDecoupled", "coupled": "SyncCoupled"}
        return names[part] if preset == ECOSERVE else preset

    return _row(f"1-{id_}", _ALL, f"{shown(over)} over {shown(under)}", "throughput", "x", paper, measure, note)


def _filled_figure(
    id_: str, system: str, preset: str, part: str, paper: float = math.nan, paper_to: float | None = None
) -> Figure:
    def measure(lab: Lab) -> float:
        reports = [printed(lab, preset, data, PARTS[part]) for data in NAMES]
        return 100.0 * sum(report.instances[0].kv_filled for report in reports) / len(reports)

    note, standing = ("the paper prints no number", Standing.UNCOMPARED) if math.isnan(paper) else ("", Standing.CLAIM)
    return _row(f"1-kv-{id_}", _ALL, system, "KV slots filled", "%", paper, measure, note, standing, paper_to=paper_to)


def _deciding(lab: Lab, preset: str) -> float:
    """Return the measured wall-clock seconds of the worker's decisions per output token."""
    report = loaded(lab, preset, "sharegpt")
    seconds = report.measured.worker_decisions * report.measured.worker_mean_us * 1e-6
    return seconds / max(1.0, report.overall.output_tokens_per_s * report.duration_s)


_SWEEPS: dict[str, tuple[float, ...]] = {
    "padding": (0.0, 0.05, 0.10, 0.15, 0.20, 0.30),
    "reserve": (0.0, 0.01, 0.02, 0.03, 0.04, 0.06),
    "buffer": (0.0, 0.05, 0.10, 0.15, 0.20, 0.30),
}


def _swept(lab: Lab, option: str, data: str) -> list[tuple[float, float]]:
    """Return (mean JCT, value) of the sweep; padding is held fixed."""
    return [
        (mean_ms(printed(lab, ECOSERVE, data, {"tune_padding": False, option: value}).overall.jct_ms), value)
        for value in _SWEEPS[option]
    ]


def _sweep(option: str, data: str, paper: float) -> Figure:
    def measure(lab: Lab) -> float:
        return 100.0 * min(_swept(lab, option, data))[1]

    def lent(lab: Lab) -> float:
        settings = ({"tune_padding": False, option: value} for value in _SWEEPS[option])
        return max(_borrowed(printed(lab, ECOSERVE, data, each)) for each in settings)

    note = f"of {', '.join(f'{100 * value:g}' for value in _SWEEPS[option])}, by mean JCT"
    workload, exercised = f"{NAMES[data]}, OPT-13B", lent if option == "buffer" else None
    id_, metric = f"12-{option}-{data}", f"best {option}"
    return _row(id_, workload, "itself", metric, "%", paper, measure, note, exercised=exercised)


def _spread(option: str, data: str) -> Figure:
    """Measure how much the choice matters: the worst value's JCT over the best's."""

    def measure(lab: Lab) -> float:
        return max(_swept(lab, option, data))[0] / min(_swept(lab, option, data))[0]

    note, metric = "the paper prints its sweeps as curves without numbers", f"JCT at the worst {option} over the best"
    id_, workload = f"12-{option}-{data}-spread", f"{NAMES[data]}, OPT-13B"
    return _row(id_, workload, "itself", metric, "x", 1.0, measure, note, Standing.UNCOMPARED)


# -- Fig. 10 ---------------------------------------------------------------------------------------------------------

# The paper's rates over others are ranges: over its three models for each data set, and over the data sets for each
# model. One cell lies in both; where these exclude each other (2.5 to 4 times vLLM's rate on ShareGPT over all models,
# and at most 2.33 for OPT-13B on any) it is in one of them, as far as can be told.
_OF_DATA: dict[tuple[str, str], tuple[float, float]] = {
    ("sharegpt", VLLM): (2.5, 4.0),
    ("sharegpt", FASTGEN): (1.25, 2.25),
    ("sharegpt", ORCA): (22.0, 64.0),
    ("bookcorpus", VLLM): (2.5, 2.8),
    ("bookcorpus", FASTGEN): (1.88, 2.33),
    ("bookcorpus", ORCA): (12.5, 13.0),
    ("alpaca", VLLM): (1.13, 2.14),
    ("alpaca", FASTGEN): (1.2, 1.24),
    ("alpaca", ORCA): (5.6, 9.0),
}
_OF_MODEL: dict[tuple[Model, str], tuple[float, float]] = {
    (OPT13, VLLM): (1.28, 2.33),
    (OPT13, FASTGEN): (1.2, 2.33),
    (OPT13, ORCA): (3.5, 25.0),
    (LLAMA, VLLM): (2.4, 4.0),
    (LLAMA, FASTGEN): (1.2, 2.18),
    (LLAMA, ORCA): (3.0, 64.0),
    (OPT175, VLLM): (1.28, 2.0),
    (OPT175, FASTGEN): (1.2, 2.25),
}


def _range(data: str, baseline: str, model: Model) -> tuple[float, float]:
    """Return what both ranges leave, or all of both where nothing is left."""
    (low, high), (of_low, of_high) = _OF_DATA[data, baseline], _OF_MODEL[model, baseline]
    common = max(low, of_low), min(high, of_high)
    return common if common[0] <= common[1] else (min(low, of_low), max(high, of_high))


def _rate_ratio(ours: str, data: str, baseline: str, model: Model = OPT13) -> Figure:
    """Compare sustained rates."""
    low, high = _range(data, baseline, model)
    parts = ["" if model is OPT13 else model.name, "forecast" if ours == FORECAST else ""]

    def measure(lab: Lab) -> float:
        return sustained(lab, Case(ours, data, model)) / sustained(lab, Case(baseline, data, model))

    return _row(
        "-".join(part for part in ("10-rate", data, SHORT[baseline], *parts) if part),
        f"{NAMES[data]}, {model.shown}",
        f"{ours} over {baseline}",
        "sustained rate",
        "x",
        low,
        measure,
        standing=Standing.READING if ours == FORECAST else Standing.CLAIM,
        paper_to=high,
    )


_CELLS = tuple(
    _rate_ratio(ours, data, baseline, model)
    for model in (OPT13, LLAMA, OPT175)
    for data, baseline in _OF_DATA
    for ours in (ECOSERVE, FORECAST)
    if (ours == ECOSERVE or baseline != ORCA) and (model is not OPT175 or (data == "sharegpt" and baseline != ORCA))
)


def _oracle(model: Model, paper: float) -> Figure:
    def measure(lab: Lab) -> float:
        cases = [Case(ECOSERVE, data, model) for data in NAMES]
        return sum(sustained(lab, replace(case, oracle=True)) / sustained(lab, case) for case in cases) / len(cases)

    return _row(
        f"10-oracle{'' if model is OPT13 else f'-{model.name}'}",
        f"all three, mean, {model.shown}",
        "Oracle over ecoserve",
        "sustained rate",
        "x",
        paper,
        measure,
        "true lengths, no padding; paper: only so much higher",
        kind=Kind.AT_MOST,
    )


_NOTHING = 0.005
"""Share of SLOs that counts as kept by a system that keeps none."""


def _slo_ratio(ours: str, baseline: str, paper: float) -> Figure:
    def measure(lab: Lab) -> float:
        both = [sum(attainment(lab, Case(preset, data)) for data in NAMES) for preset in (ours, baseline)]
        return both[0] / max(both[1], _NOTHING * len(NAMES))

    note = (
        f"means over the data sets, at {CALM} of EcoServe's sustained rate; the other's {100 * _NOTHING:g} % at least"
    )
    id_ = f"10-slo-{SHORT[baseline]}{'-forecast' if ours == FORECAST else ''}"
    standing = Standing.READING if ours == FORECAST else Standing.CLAIM
    return _row(id_, _ALL, f"{ours} over {baseline}", "SLO satisfaction", "x", paper, measure, note, standing)


_RATES: tuple[Figure, ...] = (
    *_CELLS,
    _oracle(OPT13, 1.08),
    _oracle(LLAMA, 1.05),
    *(
        _slo_ratio(ours, baseline, paper)
        for baseline, paper in ((FASTGEN, 1.42), (VLLM, 1.83), (ORCA, 1.93))
        for ours in (ECOSERVE, FORECAST)
    ),
)


FIGURES: tuple[Figure, ...] = (
    *_RATES,
    *(_part(part, metric) for metric in _OF_PARTS for part in _PARTS),
    *(_part(part, metric, saturated=True) for metric in _OF_PARTS for part in _PARTS),
    _anchor(ECOSERVE, 141.0, "the time of an iteration is chosen by it; paper: over all models", Standing.ANCHOR),
    _anchor(VLLM, math.nan, "the paper prints none", Standing.UNCOMPARED),
    *(_part(part, _TOKENS) for part in _PARTS),
    _spared_figure("-vllm", VLLM, VLLM, 26.0, {}, oracle=False),
    _spared_figure("-fastgen", FASTGEN, FASTGEN, 33.0, {}, oracle=False),
    _spared_with_headroom(VLLM, 26.0),
    _spared_with_headroom(FASTGEN, 33.0),
    _spared_figure("-sd", "SyncDecoupled", ECOSERVE, 100.0, PARTS["SD"], oracle=True),
    _spared_figure("-oracle", "EcoServe", ECOSERVE, 100.0, {}, oracle=True),
    _spared_figure("", "EcoServe", ECOSERVE, 100.0, {}, oracle=False),
    *(_spared_of(preset, data) for preset in (VLLM, FASTGEN) for data in NAMES),
    _throughput_ratio("multires-fastgen", (MULTIRES, "full"), (FASTGEN, "full"), 1.10),
    _throughput_ratio("fastgen-vllm", (FASTGEN, "full"), (VLLM, "full"), 1.69, "paper: vLLM's is 41 % lower"),
    _throughput_ratio("coupled-multires", (ECOSERVE, "coupled"), (MULTIRES, "full"), 0.928),
    _throughput_ratio("sd-coupled", (ECOSERVE, "SD"), (ECOSERVE, "coupled"), 1.31),
    _filled_figure("sd", "EcoServe-SD", ECOSERVE, "SD", 63.0, 79.0),
    _filled_figure("vllm", VLLM, VLLM, "full"),
    _filled_figure("sdo", "EcoServe-SDO", ECOSERVE, "SDO"),
    _filled_figure("full", "EcoServe", ECOSERVE, "full"),
    _filled_figure("forecast", "EcoServe by forecast", ECOSERVE, "forecast"),
    _row(
        "11-scheduling",
        "ShareGPT, OPT-13B",
        VLLM,
        "deciding time per token",
        "x",
        1.0293,
        lambda lab: _deciding(lab, ECOSERVE) / _deciding(lab, VLLM),
        "ours: wall-clock of the worker's decisions, jumps over certain iterations included",
        kind=Kind.VALUE,
        where="Fig. 11j",
    ),
    *(_sweep("padding", data, 100.0 * PADDING[data]) for data in NAMES),
    *(_sweep("reserve", data, 100.0 * RESERVE[data]) for data in NAMES),
    *(_sweep("buffer", data, 100.0 * BUFFER[data]) for data in NAMES),
    *(_spread(option, "sharegpt") for option in _SWEEPS),
)
