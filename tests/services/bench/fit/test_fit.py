"""Fits of the simulator's constants: what was made with the model's own constants is fitted without an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cohort.services.bench.__main__ import main

pytest.importorskip("scipy")

from cohort.common.policies.cost_model import StackShape
from cohort.services.bench.fit.cost_model import errors, fit_cpu, predicted, profile_points
from cohort.services.simulator.hardware import load_device

MODEL = "smollm2-135m"


def made_up(folder: Path) -> Path:
    """A profile whose times are what the device file says."""
    device, file = load_device("cpu-core")
    known = next(iter(file.stacks.values()))
    stack = StackShape("file", known.launch_s, known.step_s, known.row_s)
    shapes = [(1, 64, 64), (1, 512, 512), (1, 64, 1024), (4, 128, 128)]
    shapes += [(rows, 1, context) for rows in (1, 4, 16, 64) for context in (32, 256, 1024)]
    path = folder / "points.json"
    points = [
        {"shape": {"rows": rows, "tokens_per_row": count, "context": context}, "median_s": 1.0, "fastest_s": 1.0}
        for rows, count, context in shapes
    ]
    path.write_text(json.dumps({"model": MODEL, "points": points}))
    _, read = profile_points(path, "median_s")
    for entry, point in zip(points, read, strict=True):
        entry["median_s"] = entry["fastest_s"] = predicted(point, MODEL, device, stack)
    path.write_text(json.dumps({"model": MODEL, "points": points}))
    return path


def test_a_profile_made_with_the_model_is_fitted(tmp_path: Path) -> None:
    model, points = profile_points(made_up(tmp_path), "median_s")
    device, stack = fit_cpu(points, model, load_device("cpu-core")[0])
    found = errors(points, lambda point: predicted(point, model, device, stack))
    assert set(found) == {"prefill", "decode"} and all(p90 < 0.05 for _, p90, _, _ in found.values())


def test_the_command_prints_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "cost-model", "profile", str(made_up(tmp_path)), "--device", "cpu-core"]) == 0
    shown = capsys.readouterr().out
    assert "cpu-core: 16 points of smollm2-135m" in shown and "compute_efficiency" in shown
    assert "file       decode   median   0.0%" in shown
    assert main(["fit", "cost-model", "profile", str(tmp_path / "absent.json")]) == 2
    assert "absent.json:cannotberead" in "".join(capsys.readouterr().err.split())  # lines end where the terminal does
