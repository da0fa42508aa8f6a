"""Fits of the simulator's constants: what was made with the model's own constants is fitted without an error."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from cohort.services.bench.__main__ import main

pytest.importorskip("scipy")

from cohort.common.policies.cost_model import StackShape
from cohort.common.policies.step_times.step_cost import BatchShape, step_seconds
from cohort.common.types import StepTimes
from cohort.services.bench.fit.cost_model import errors, fit_cpu, learned, predicted, profile_points
from cohort.services.simulator.hardware.hardware import load_device

MODEL = "smollm2-135m"


def made_up(folder: Path, mixed_share: float | None = None) -> Path:
    """A profile whose times are what the device file says; with mixed iterations, if mixing has a price at all."""
    device, file = load_device("cpu-core")
    known = next(iter(file.stacks.values()))
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
    points: list[dict[str, Any]] = [{"shape": shape, "median_s": 1.0, "fastest_s": 1.0} for shape in words]
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


@pytest.mark.parametrize("share", [0.0, 0.2])
def test_the_price_of_mixing_is_fitted_where_it_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], share: float
) -> None:
    path = made_up(tmp_path, share)
    model, points = profile_points(path, "median_s")
    assert sum(point.kind == "mixed" for point in points) == 6
    assert fit_cpu(points, model, load_device("cpu-core")[0])[1].mixed_share == pytest.approx(share, abs=0.03)
    assert main(["fit", "cost-model", "profile", str(path), "--device", "cpu-core"]) == 0
    assert "mixed_share" in capsys.readouterr().out


def test_the_price_of_mixing_is_fitted_to_recordings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    times = StepTimes(0.001, 0.0002, 0.0001, 0.004, 0.0, 1e-6, mixed_share=0.25)
    path, random, now_s = tmp_path / "worker.jsonl", Random(1), 0.0
    lines = [json.dumps({"setup": {}})]
    for number in range(600):
        decodes = [random.randint(50, 900) for _ in range(random.choice([0, 2, 8, 20]))]
        chunk = random.randint(16, 500) if not decodes or random.random() < 0.6 else 0
        shape = BatchShape(0, 0, 0, len(decodes), sum(decodes))
        rows = [f"r{number} [{end - 1}, {end})" for end in decodes]
        if chunk:
            shape, rows = shape.with_prefill(0, chunk), [f"p{number} [0, {chunk})", *rows]
        lines.append(json.dumps({"now_s": now_s, "events": [], "effects": [f"StartStep {'; '.join(rows)}"]}))
        now_s += step_seconds(times, shape)
        ended = {"event": "StepEnded", "sampled": []}
        lines.append(json.dumps({"now_s": now_s, "events": [ended], "effects": []}))
    path.write_text("\n".join(lines) + "\n")
    table, counted = learned(path)
    assert table.step_times is not None
    assert table.step_times.mixed_share == pytest.approx(0.25, abs=0.04)
    assert sum(counted.values()) == 600 and set(counted) == {"decode", "mixed", "prefill"}
    assert main(["fit", "cost-model", "recordings", str(path)]) == 0
    assert "worker.jsonl: mixed_share 0.2" in capsys.readouterr().out


def test_the_command_prints_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "cost-model", "profile", str(made_up(tmp_path)), "--device", "cpu-core"]) == 0
    shown = capsys.readouterr().out
    assert "cpu-core: 16 points of smollm2-135m" in shown and "compute_efficiency" in shown
    assert "file       decode   median   0.0%" in shown
    assert main(["fit", "cost-model", "profile", str(tmp_path / "absent.json")]) == 2
    assert "absent.json:cannotberead" in "".join(capsys.readouterr().err.split())  # lines end where the terminal does
