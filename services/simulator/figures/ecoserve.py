"""EcoServe §2 and §4: OPT-13B, Llama-33B and OPT-175B on A100-80GB, against ORCA, vLLM, FastGen and MultiRes.

Models, data sets, systems and choices that the paper leaves open: `ecoserve_setup`; Fig. 10: `ecoserve_rates`.
"""

from __future__ import annotations

import enum
import math
from dataclasses import replace
from typing import Any

from cohort.services.simulator.core.report import SimReport
from cohort.services.simulator.figures.claim import Kind, Standing
from cohort.services.simulator.figures.ecoserve_rates import RATES
from cohort.services.simulator.figures.ecoserve_setup import (
    BUFFER,
    BY_DEVICE,
    ECOSERVE,
    FASTGEN,
    MULTIRES,
    NAMES,
    PADDING,
    PARTS,
    RESERVE,
    SHORT,
    TABLE_2_PER_S,
    VLLM,
    Case,
    loaded,
    mean_ms,
    patient,
    printed,
    run_at,
)
from cohort.services.simulator.figures.figure import Figure, Lab


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


class _At(enum.Enum):
    """Where Fig. 11 is measured; the suffix of the row's id."""

    PRINTED = "-printed"
    """At the rates of Table 2."""
    PATIENT = "-table-2"
    """The same with `ecoserve.patience_s` as in the preset."""
    DEVICE = "-device"
    """At the rates of Table 2, iterations as long as the device file says, newcomers that leave headroom."""
    LOADED = ""
    """Where EcoServe saturates, with the preset's patience."""


_SAID = {
    _At.PRINTED: "",
    _At.PATIENT: "no request overtakes one that is overdue by 30 s",
    _At.DEVICE: "iterations as the device file says, a quarter of the paper's; newcomers leave headroom",
    _At.LOADED: "where EcoServe saturates; no request overtakes one that is overdue by 30 s",
}


def _report(lab: Lab, at: _At, preset: str, data: str, eco: dict[str, Any] | None = None) -> SimReport:
    match at:
        case _At.LOADED:
            return loaded(lab, preset, data, eco)
        case _At.PATIENT:
            return run_at(lab, patient(Case(preset, data, eco=tuple(sorted((eco or {}).items())))), TABLE_2_PER_S[data])
        case _At.DEVICE:
            return printed(lab, preset, data, eco, **BY_DEVICE)
        case _:
            return printed(lab, preset, data, eco)


_OF_PARTS: dict[str, dict[str, tuple[float, float]]] = {
    # Fig. 11's text, over models and data sets: metric, part, the end nearer to no effect and the other
    "throughput": {"D": (1.75, 1.84), "SD": (1.91, 2.13), "SDO": (2.15, 2.32), "full": (2.67, 2.96)},
    "JCT": {"D": (0.84, 0.64), "SD": (0.65, 0.42), "SDO": (0.57, 0.36), "full": (0.36, 0.09)},
    "TBT": {"D": (0.86, 0.68), "SD": (0.70, 0.48), "SDO": (0.59, 0.38), "full": (0.40, 0.28)},
}
_TOKENS = "output tokens/s"
_PARTS = ("D", "SD", "SDO", "full", "forecast")


def _part(part: str, metric: str, at: _At = _At.PRINTED) -> Figure:
    """One variant against vLLM, mean of the data sets."""

    def measure(lab: Lab) -> float:
        pairs = [(_report(lab, at, ECOSERVE, data, PARTS[part]), _report(lab, at, VLLM, data)) for data in NAMES]
        return sum(_metric(ours, metric) / _metric(theirs, metric) for ours, theirs in pairs) / len(pairs)

    name = {"full": "EcoServe", "forecast": "EcoServe by forecast"}.get(part, f"EcoServe-{part}")
    of = "tokens" if metric == _TOKENS else metric.lower()
    paper, to = _OF_PARTS.get(metric, {}).get("full" if part == "forecast" else part, (math.nan, None))
    said = (
        _SAID[at],
        "paper: of EcoServe" if part == "forecast" else "",
        "the paper prints none" if math.isnan(paper) else "",
    )
    reading = part == "forecast" or at is not _At.PRINTED
    return Figure(
        f"ecoserve-11-{of}-{part.lower()}{at.value}",
        "ecoserve",
        "EcoServe Fig. 11",
        "all three, mean, OPT-13B",
        f"{name} against vLLM",
        metric,
        "x",
        paper,
        measure,
        "; ".join(text for text in said if text),
        Standing.BESIDE if math.isnan(paper) else Standing.READING if reading else Standing.CLAIM,
        paper_to=to,
    )


def _failed(report: SimReport, preset: str) -> float:
    """Failures to get further KV while running (for EcoServe: E5's stops and E8's late borrowers), per request."""
    failed = float(sum(instance.allocation_failures for instance in report.instances))
    if preset == ECOSERVE:
        named = ("underpredictions_stopped_total", "borrowers_late_total")
        failed = sum(instance.scheduler[name] for instance in report.instances for name in named)
    return min(1.0, failed / max(1, report.overall.finished))


def _spared(lab: Lab, preset: str, eco: dict[str, Any] | None = None, **other: Any) -> float:
    """Percent of the requests that are served without such a failure."""
    reports = [printed(lab, preset, data, eco, **other) for data in NAMES]
    return 100.0 * (1.0 - sum(_failed(report, preset) for report in reports) / len(reports))


def _spared_figure(id_: str, system: str, preset: str, paper: float, eco: dict[str, Any], *, oracle: bool) -> Figure:
    return Figure(
        f"ecoserve-1d-failures{id_}",
        "ecoserve",
        "EcoServe Fig. 1d",
        "all three, mean, OPT-13B",
        system,
        "requests without allocation failure",
        "%",
        paper,
        lambda lab: _spared(lab, preset, eco, oracle=oracle),
        "true lengths, as in the paper's §2" if oracle else "predicted lengths" if preset == ECOSERVE else "",
        Standing.READING if preset == ECOSERVE and not oracle else Standing.CLAIM if oracle else Standing.ANCHOR,
    )


def _spared_otherwise(preset: str, paper: float, also: str, note: str, how: dict[str, Any]) -> Figure:
    """Without what the paper's numbers choose."""
    found = _spared_figure(f"-{SHORT[preset]}-{also}", preset, preset, paper, {}, oracle=False)
    return replace(found, measure=lambda lab: _spared(lab, preset, **how), note=note, standing=Standing.READING)


def _anchor(preset: str, paper: float, note: str, standing: Standing) -> Figure:
    """Mean time between tokens."""
    return Figure(
        f"ecoserve-11-anchor-{SHORT[preset]}",
        "ecoserve",
        "EcoServe Fig. 11",
        "all three, mean, OPT-13B",
        preset,
        "time between tokens",
        "ms",
        paper,
        lambda lab: sum(mean_ms(printed(lab, preset, data).overall.tbt_ms) for data in NAMES) / len(NAMES),
        note,
        standing,
    )


def _spared_of(preset: str, data: str) -> Figure:
    """Of one data set, beside the mean of three that the paper prints."""
    return Figure(
        f"ecoserve-1d-failures-{SHORT[preset]}-{data}",
        "ecoserve",
        "EcoServe Fig. 1d",
        f"{NAMES[data]}, OPT-13B",
        preset,
        "requests without allocation failure",
        "%",
        math.nan,
        lambda lab: 100.0 * (1.0 - _failed(printed(lab, preset, data), preset)),
        "the paper prints their mean",
        Standing.BESIDE,
    )


def _throughput_ratio(
    id_: str,
    over: tuple[str, str],
    under: tuple[str, str],
    paper: float,
    note: str = "",
    standing: Standing = Standing.CLAIM,
) -> Figure:
    """Of two systems with known lengths (§2), each a preset and a part of `PARTS`, mean of the data sets."""

    def measure(lab: Lab) -> float:
        pairs = [
            [
                printed(lab, preset, data, PARTS[part], oracle=True).overall.requests_per_s
                for preset, part in (over, under)
            ]
            for data in NAMES
        ]
        return sum(first / second for first, second in pairs) / len(pairs)

    def shown(system: tuple[str, str]) -> str:
        preset, part = system
        names = {"SD": "SyncDecoupled", "coupled": "SyncCoupled", "D": "UnsyncedDecoupled"}
        return names[part] if preset == ECOSERVE else preset

    return Figure(
        f"ecoserve-1-{id_}",
        "ecoserve",
        "EcoServe Fig. 1",
        "all three, mean, OPT-13B",
        f"{shown(over)} over {shown(under)}",
        "throughput",
        "x",
        paper,
        measure,
        note,
        standing,
    )


def _filled(lab: Lab, preset: str, eco: dict[str, Any]) -> float:
    reports = [printed(lab, preset, data, eco) for data in NAMES]
    return 100.0 * sum(report.instances[0].kv_filled for report in reports) / len(reports)


def _filled_figure(
    id_: str, system: str, preset: str, part: str, paper: float = math.nan, paper_to: float | None = None
) -> Figure:
    return Figure(
        f"ecoserve-1-kv-{id_}",
        "ecoserve",
        "EcoServe Fig. 1",
        "all three, mean, OPT-13B",
        system,
        "KV slots filled",
        "%",
        paper,
        lambda lab: _filled(lab, preset, PARTS[part]),
        "the paper prints no number" if math.isnan(paper) else "",
        Standing.BESIDE if math.isnan(paper) else Standing.CLAIM,
        paper_to=paper_to,
    )


def _deciding(lab: Lab, preset: str) -> float:
    """Measured wall-clock seconds of the worker's decisions per output token."""
    report = loaded(lab, preset, "sharegpt")
    seconds = report.measured.worker_decisions * report.measured.worker_mean_us * 1e-6
    return seconds / max(1.0, report.overall.output_tokens_per_s * report.duration_s)


def _undecided(lab: Lab, data: str, name: str) -> float:
    """E3 · Percent of the iterations that formed no batch of answers, or needed no decision at all."""
    figures = loaded(lab, ECOSERVE, data).instances[0].scheduler
    share = figures[name] / max(1.0, figures["iterations_total"])
    return 100.0 * (share if name.startswith("iterations") else 1.0 - share)


def _quiet(data: str, name: str, metric: str) -> Figure:
    return Figure(
        f"ecoserve-2-{'undecided' if name.startswith('iterations') else 'no-formation'}-{data}",
        "ecoserve",
        "EcoServe §2.2",
        f"{NAMES[data]}, OPT-13B",
        "itself",
        metric,
        "%",
        97.86,
        lambda lab: _undecided(lab, data, name),
        "paper: SyncCoupled's scheduling is 2.14 % of JCT; it prints no share of iterations",
        Standing.BESIDE,
    )


_SWEEPS: dict[str, tuple[float, ...]] = {
    "padding": (0.0, 0.05, 0.10, 0.15, 0.20, 0.30),
    "reserve": (0.0, 0.01, 0.02, 0.03, 0.04, 0.06),
    "buffer": (0.0, 0.05, 0.10, 0.15, 0.20, 0.30),
}


def _swept(lab: Lab, option: str, data: str) -> list[tuple[float, float]]:
    """(mean JCT, value) of the sweep; padding is held fixed."""
    return [
        (mean_ms(printed(lab, ECOSERVE, data, {"tune_padding": False, option: value}).overall.jct_ms), value)
        for value in _SWEEPS[option]
    ]


def _sweep(option: str, data: str, paper: float) -> Figure:
    return Figure(
        f"ecoserve-12-{option}-{data}",
        "ecoserve",
        "EcoServe Fig. 12",
        f"{NAMES[data]}, OPT-13B",
        "itself",
        f"best {option}",
        "%",
        paper,
        lambda lab: 100.0 * min(_swept(lab, option, data))[1],
        f"of {', '.join(f'{100 * v:g}' for v in _SWEEPS[option])}, by mean JCT",
    )


def _spread(option: str, data: str) -> Figure:
    """How much the choice matters: the worst value's JCT over the best's."""
    return Figure(
        f"ecoserve-12-{option}-{data}-spread",
        "ecoserve",
        "EcoServe Fig. 12",
        f"{NAMES[data]}, OPT-13B",
        "itself",
        f"JCT at the worst {option} over the best",
        "x",
        1.0,
        lambda lab: max(_swept(lab, option, data))[0] / min(_swept(lab, option, data))[0],
        "the paper prints its sweeps as curves without numbers",
        Standing.BESIDE,
    )


FIGURES: tuple[Figure, ...] = (
    *RATES,
    *(_part(part, metric) for metric in _OF_PARTS for part in _PARTS),
    *(_part(part, metric, _At.LOADED) for metric in _OF_PARTS for part in _PARTS),
    *(_part(part, "throughput", _At.PATIENT) for part in _PARTS),
    *(_part(part, metric, _At.DEVICE) for metric in _OF_PARTS for part in _PARTS),
    _anchor(ECOSERVE, 141.0, "the time of an iteration is chosen by it; paper: over all models", Standing.ANCHOR),
    _anchor(VLLM, math.nan, "the paper prints none", Standing.BESIDE),
    *(_part(part, _TOKENS, at) for at in (_At.PRINTED, _At.PATIENT) for part in _PARTS),
    _spared_figure("-vllm", VLLM, VLLM, 26.0, {}, oracle=False),
    _spared_figure("-fastgen", FASTGEN, FASTGEN, 33.0, {}, oracle=False),
    *(
        _spared_otherwise(preset, paper, also, note, how)
        for preset, paper in ((VLLM, 26.0), (FASTGEN, 33.0))
        for also, note, how in (
            ("device", _SAID[_At.DEVICE], BY_DEVICE),
            ("headroom", "newcomers leave headroom", {"headroom": True}),
        )
    ),
    _spared_figure("-sd", "SyncDecoupled", ECOSERVE, 100.0, PARTS["SD"], oracle=True),
    _spared_figure("-oracle", "EcoServe", ECOSERVE, 100.0, {}, oracle=True),
    _spared_figure("", "EcoServe", ECOSERVE, 100.0, {}, oracle=False),
    *(_spared_of(preset, data) for preset in (VLLM, FASTGEN) for data in NAMES),
    _throughput_ratio("multires-fastgen", (MULTIRES, "full"), (FASTGEN, "full"), 1.10),
    _throughput_ratio("fastgen-vllm", (FASTGEN, "full"), (VLLM, "full"), 1.69, "paper: vLLM's is 41 % lower"),
    _throughput_ratio("coupled-multires", (ECOSERVE, "coupled"), (MULTIRES, "full"), 0.928),
    _throughput_ratio("sd-coupled", (ECOSERVE, "SD"), (ECOSERVE, "coupled"), 1.31),
    _throughput_ratio(
        "sd-d", (ECOSERVE, "SD"), (ECOSERVE, "D"), 1.15, "paper: Fig. 11's 2.04 over 1.78", Standing.READING
    ),
    _filled_figure("sd", "EcoServe-SD", ECOSERVE, "SD", 63.0, 79.0),
    _filled_figure("vllm", VLLM, VLLM, "full"),
    _filled_figure("sdo", "EcoServe-SDO", ECOSERVE, "SDO"),
    _filled_figure("full", "EcoServe", ECOSERVE, "full"),
    _filled_figure("forecast", "EcoServe by forecast", ECOSERVE, "forecast"),
    Figure(
        "ecoserve-11-scheduling",
        "ecoserve",
        "EcoServe Fig. 11j",
        "ShareGPT, OPT-13B",
        VLLM,
        "deciding time per token",
        "x",
        1.0293,
        lambda lab: _deciding(lab, ECOSERVE) / _deciding(lab, VLLM),
        "ours: wall-clock of the worker's decisions, jumps over certain iterations included",
        kind=Kind.VALUE,
    ),
    *(
        _quiet(data, name, metric)
        for data in NAMES
        for name, metric in (
            ("formations_total", "iterations without batch formation"),
            ("iterations_undecided_total", "iterations without any decision"),
        )
    ),
    *(_sweep("padding", data, 100.0 * PADDING[data]) for data in NAMES),
    *(_sweep("reserve", data, 100.0 * RESERVE[data]) for data in NAMES),
    *(_sweep("buffer", data, 100.0 * BUFFER[data]) for data in NAMES),
    *(_spread(option, "sharegpt") for option in _SWEEPS),
)
