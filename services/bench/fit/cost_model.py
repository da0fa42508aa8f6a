"""The cost model of one device, fitted to the steps of its engine that `cohort profile` measured. Called by `machine`.

What mixing prompts and decodes costs (`mixed_share` of a stack) is fitted where the points hold mixed iterations.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from cohort.common.policies.cost_model import CostModel, DeviceShape, ModelShape, StackShape, StepWork, prefill_pairs

Errors = dict[str, tuple[float, float, float, str]]
"""Kind → median, 90th percentile and worst relative error, and where the worst is."""


@dataclass(frozen=True)
class Point:
    """One measured iteration (the median of its repetitions)."""

    kind: str
    label: str
    work: StepWork
    seconds: float


def profile_points(path: Path) -> list[Point]:
    """Of a file that `cohort profile` wrote."""
    data = json.loads(path.read_text(encoding="utf-8"))
    points = []
    for entry in data["points"]:
        shape = entry["shape"]
        rows, count, context = shape["rows"], shape["tokens_per_row"], shape["context"]
        label, kind = f"{rows} x {count} at {context}", "prefill"
        if count == 1:
            kind, work = "decode", StepWork(rows, rows, rows, 0, 0, rows, rows * context, context)
        else:
            beside, at = shape.get("decodes", 0), shape.get("decode_context", 0)
            pairs, together = rows * prefill_pairs(context - count, count), rows + beside
            tokens = rows * count + beside
            work = StepWork(tokens, together, together, pairs, rows * context, beside, beside * at, at)
            if beside:
                kind, label = "mixed", f"{label}, {beside} at {at}"
        points.append(Point(kind, label, work, entry["median_s"]))
    return points


def errors(points: Sequence[Point], predict: Callable[[Point], float]) -> Errors:
    """Median, 90th percentile and worst relative error, and where the worst is; by kind."""
    table = {}
    for kind in ("prefill", "decode", "mixed"):
        some = [point for point in points if point.kind == kind]
        if not some:
            continue
        off = np.array([abs(predict(point) / point.seconds - 1) for point in some])
        worst = int(off.argmax())
        table[kind] = (float(np.median(off)), float(np.quantile(off, 0.9)), float(off[worst]), some[worst].label)
    return table


def fit_cpu(points: Sequence[Point], model: ModelShape, device: DeviceShape) -> tuple[DeviceShape, StackShape]:
    """Efficiencies of one device, and what its stack adds, by the points of one model on it alone."""
    mixes = any(point.kind == "mixed" for point in points)

    def unpack(x: np.ndarray[Any, Any]) -> tuple[DeviceShape, StackShape]:
        fitted = replace(
            device,
            compute_efficiency=x[0],
            memory_efficiency=x[1],
            attention_efficiency=x[2],
            layer_s=x[3] * 1e-5,
            kv_efficiency=x[6],
        )
        return fitted, StackShape("fit", 0.0, x[4] * 1e-4, x[5] * 1e-5, mixed_share=x[7] if mixes else 0.0)

    def residuals(x: np.ndarray[Any, Any]) -> list[float]:
        cost = CostModel(model, *unpack(x))
        return [float(np.log(cost.step_s(point.work) / point.seconds)) for point in points]

    start = np.array([0.6, 0.6, 0.3, 2.0, 5.0, 2.0, 0.4, 0.05])
    low = np.array([*[1e-3] * 7, -0.5])
    high = np.array([0.9, 0.9, 0.9, 100.0, 500.0, 500.0, 0.9, 2.0])
    result = least_squares(residuals, start, bounds=(low, high), loss="soft_l1", f_scale=0.1)
    return unpack(result.x)
