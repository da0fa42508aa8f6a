"""`cohort bench token-cost` measures real streams of real processes. How much a token costs is not tested."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cohort.services.bench.__main__ import main
from cohort.services.bench.chaos import tiny_model

pytestmark = pytest.mark.slow


def test_a_few_streams_are_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, report = tiny_model.write(tmp_path / "model"), tmp_path / "cost.json"
    load = ["--streams", "3", "--tokens-per-s", "30", "--users", "2", "--seconds", "1"]
    load += ["--set", "predictor.learns=false"]  # to import what a training needs takes seconds
    assert main(["token-cost", *load, "--model", str(model), "--json", str(report)]) == 0
    costs = json.loads(report.read_text())
    (found,), (requests,) = costs["streams"], costs["requests"]
    assert (found["streams"], found["workers"], found["gateways"]) == (3, 1, 1)
    assert found["tokens"] > 0 and all(
        found[f"{part}_us"] > 0 for part in ("gateway", "worker", "manager", "bare", "write")
    )
    assert all(requests[part] > 0 for part in ("requests_per_s", "gateway_us", "others_us", "bare_per_s", "bare_us"))
    shown = capsys.readouterr().out
    assert "together, µs" in shown and "over it" in shown


def test_a_result_that_cannot_be_written_fails_before_the_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["token-cost", "--json", "/nowhere/at/all/x.json"]) == 2
    assert "no folder" in capsys.readouterr().err
