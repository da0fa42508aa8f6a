"""EcoServe Fig. 10: sustained rates over ORCA, vLLM and FastGen, and the SLOs kept.

The paper's rates over others are ranges: over its three models for each data set, and over the data sets for each
model. One cell lies in both; where these exclude each other (2.5 to 4 times vLLM's rate on ShareGPT over all models,
and at most 2.33 for OPT-13B on any) it is in one of them, as far as can be told.

Models, data sets and choices that the paper leaves open: `ecoserve_setup`. Called by `ecoserve`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from cohort.services.simulator.figures.claim import Kind, Standing
from cohort.services.simulator.figures.ecoserve_setup import (
    BY_DEVICE,
    CALM,
    ECOSERVE,
    FASTGEN,
    FORECAST,
    LLAMA,
    NAMES,
    OPT13,
    OPT175,
    ORCA,
    SHORT,
    VLLM,
    Case,
    Model,
    attainment,
    patient,
    sustained,
)
from cohort.services.simulator.figures.figure import Figure, Lab

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
    """What both ranges leave, or all of both where nothing is left."""
    (low, high), (of_low, of_high) = _OF_DATA[data, baseline], _OF_MODEL[model, baseline]
    common = max(low, of_low), min(high, of_high)
    return common if common[0] <= common[1] else (min(low, of_low), max(high, of_high))


def _rate_ratio(
    ours: str,
    data: str,
    baseline: str,
    model: Model = OPT13,
    also: str = "",
    *,
    to_end: bool = False,
    of_ours: Callable[[Case], Case] = lambda case: case,
    **other: Any,
) -> Figure:
    """Sustained rates over each other; `other`: what differs from `Case` for both."""
    low, high = _range(data, baseline, model)
    suffix = "".join(f"-{part}" for part in ("" if model is OPT13 else model.name, also) if part)
    return Figure(
        f"ecoserve-10-rate-{data}-{SHORT[baseline]}{suffix}{'-forecast' if ours == FORECAST else ''}",
        "ecoserve",
        "EcoServe Fig. 10",
        f"{NAMES[data]}, {model.shown}",
        f"{ours} over {baseline}",
        "sustained rate",
        "x",
        low,
        lambda lab: (
            sustained(lab, of_ours(Case(ours, data, model, **other)), to_end=to_end)
            / sustained(lab, Case(baseline, data, model, **other), to_end=to_end)
        ),
        also,
        Standing.READING if also or ours == FORECAST else Standing.CLAIM,
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

    return Figure(
        f"ecoserve-10-oracle{'' if model is OPT13 else f'-{model.name}'}",
        "ecoserve",
        "EcoServe Fig. 10",
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

    return Figure(
        f"ecoserve-10-slo-{SHORT[baseline]}{'-forecast' if ours == FORECAST else ''}",
        "ecoserve",
        "EcoServe Fig. 10",
        "all three, mean, OPT-13B",
        f"{ours} over {baseline}",
        "SLO satisfaction",
        "x",
        paper,
        measure,
        f"means over the data sets, at {CALM} of EcoServe's sustained rate; the other's {100 * _NOTHING:g} % at least",
        Standing.READING if ours == FORECAST else Standing.CLAIM,
    )


_OTHERWISE: dict[str, dict[str, Any]] = {
    "patient": {"of_ours": patient},
    "to-end": {"to_end": True},
    "device": BY_DEVICE,
}
"""Readings of Fig. 10: no request overtakes one that is overdue by 30 s; with requests unserved at the end, too;
iterations as the device file says."""

RATES: tuple[Figure, ...] = (
    *_CELLS,
    *(
        _rate_ratio(ECOSERVE, data, baseline, also=also, **how)
        for data in ("sharegpt", "bookcorpus")
        for baseline in (VLLM, FASTGEN)
        for also, how in _OTHERWISE.items()
    ),
    _rate_ratio(ECOSERVE, "sharegpt", VLLM, also="recompute", preemption="recompute"),
    _rate_ratio(ECOSERVE, "sharegpt", VLLM, also="eager", stack="eager"),
    _rate_ratio(FORECAST, "sharegpt", VLLM, also="eager", stack="eager"),
    _oracle(OPT13, 1.08),
    _oracle(LLAMA, 1.05),
    *(
        _slo_ratio(ours, baseline, paper)
        for baseline, paper in ((FASTGEN, 1.42), (VLLM, 1.83), (ORCA, 1.93))
        for ours in (ECOSERVE, FORECAST)
    ),
)
