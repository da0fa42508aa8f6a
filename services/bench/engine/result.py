"""The document of `cohort bench engine`: measurements of the child and here, and their consequences.

Made by `engine`, shown by `render`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cohort.services.bench.decisions.growth import Curve, curve
from cohort.services.bench.engine.report import EngineReport
from cohort.services.bench.targets import Target


class EngineBench(msgspec.Struct, frozen=True, kw_only=True):
    """The document behind `--json`. `engine` None: only growth was asked for."""

    schema_version: int = 1
    mode: str = "engine"
    quick: bool
    engine: EngineReport | None
    growth: list[Curve]
    targets: list[Target]
    findings: list[str]


def encode(result: EngineBench) -> bytes:
    """JSON with what is derived: whether targets were met."""
    document: dict[str, Any] = msgspec.to_builtins(result)
    document["targets"] = [{**msgspec.to_builtins(target), "met": target.met} for target in result.targets]
    return msgspec.json.encode(document)


def step_curves(engine: EngineReport) -> list[Curve]:
    """Times of steps against what they compute: prefill against its multiply-adds, decode against the context."""
    model, curves = engine.model, []
    prefills = []
    for comparison in engine.comparisons:
        for point in comparison.steps:
            if comparison.kind == "prefill" and model.layer_parameters:
                tokens = point.tokens_per_row
                # Products, and both halves of causal attention
                work = tokens * model.layer_parameters + model.layers * model.query_size * tokens * (tokens + 1)
                prefills.append((float(work), point.step.median_s))
        if comparison.kind == "decode" and len(comparison.steps) > 1:
            points = [(float(point.context), point.step.median_s) for point in comparison.steps]
            curves.append(curve(f"decode step, {comparison.tokens} rows", "context", points, work_exponent=1.0))
    if len(prefills) > 1:
        curves.append(curve("prefill step", "multiply-adds", prefills, work_exponent=1.0))
    return curves
