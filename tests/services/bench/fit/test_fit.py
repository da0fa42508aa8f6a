"""A fit to an engine's points: what was made with the model's own constants is fitted without an error."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("scipy")

from cohort.common.policies.cost_model import CostModel, StackShape
from cohort.services.bench.fit.machine import Point, errors, fit_cpu, profile_points
from cohort.services.simulator.hardware.hardware import load_device, load_model

MODEL, (DEVICE, FILE) = load_model("smollm2-135m"), load_device("cpu-core")


def made_up(folder: Path, mixed_share: float | None = None) -> list[Point]:
    """Points whose times are what the device file says; with mixed iterations, if mixing has a price at all."""
    known = next(iter(FILE.stacks.values()))
    stack = StackShape("file", known.launch_s, known.step_s, known.row_s, mixed_share=mixed_share or 0.0)
    shapes = [(1, 64, 64), (1, 512, 512), (1, 64, 1024), (4, 128, 128)]
    shapes += [(rows, 1, context) for rows in (1, 4, 16, 64) for context in (32, 256, 1024)]
    path = folder / "points.json"
    words = [{"rows": rows, "tokens_per_row": count, "context": context} for rows, count, context in shapes]
    if mixed_share is not None:
        words += [
            {"rows": 1, "tokens_per_row": chunk, "context": chunk, "decodes": rows, "decode_context": 256}
            for chunk in (16, 64, 256)
            for rows in (1, 8)
        ]
    entries: list[dict[str, Any]] = [{"shape": shape, "median_s": 1.0} for shape in words]
    path.write_text(json.dumps({"points": entries}))
    cost = CostModel(MODEL, DEVICE, stack)
    return [replace(point, seconds=cost.step_s(point.work)) for point in profile_points(path)]


def test_a_profile_made_with_the_model_is_fitted(tmp_path: Path) -> None:
    points = made_up(tmp_path)
    cost = CostModel(MODEL, *fit_cpu(points, MODEL, DEVICE))
    found = errors(points, lambda point: cost.step_s(point.work))
    assert set(found) == {"prefill", "decode"} and all(p90 < 0.05 for _, p90, _, _ in found.values())


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_the_price_of_mixing_is_fitted_where_it_was_measured(tmp_path: Path, share: float) -> None:
    points = made_up(tmp_path, share)
    assert sum(point.kind == "mixed" for point in points) == 6
    assert fit_cpu(points, MODEL, DEVICE)[1].mixed_share == pytest.approx(share, abs=0.03)
